"""Short outputs of the model, which must be identical, token for token, at every fallback level."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial

import torch

from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.doctor.outcome import ANSWERS, MEMORY, MODEL, CheckError, Figure, Figures
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.fallbacks import MECHANISMS, NEEDS
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.loading import LoadedModel, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.budget import DEVICE_RESERVE_BYTES, FreeMemory, activation_bytes
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.rig import Rig, on_levels
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.registry import random_model
from neo_desktop.models.tokenizer import ByteTokenizer
from neo_desktop.models.traced.config import TracedConfig

LOADING_DEADLINE_S = 900.0  # large weights on a slow disk; first outputs on a slow computer
LEAST_DEADLINE_S = 60.0  # for other outputs: compilation takes a while
DEADLINE_FACTOR = 10  # limit relative to the time of the first outputs
QUICK_LAYERS = 2  # of a quick check, which must fit beside other programs
QUICK_EXPERTS, QUICK_VOCABULARY, QUICK_INTERMEDIATE = 8, 32_768, 8192
PROMPT_TOKENS = (1, 17, 40, 200)
ANSWER_TOKENS = 12
CACHE_TOKENS = 2048
MAX_REQUESTS = 8
POLICIES = ("gpu-only", "fastdecode")  # KV in device memory, and in host memory
# Two tokens whose log-probabilities differ by less are a tie, which rounding may decide.
TIES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


class AnswerChecks:
    """The model, loaded once, and its outputs at the lowest fallback levels."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.is_loaded = False
        self._lowest_s: float | None = None

    @property
    def mechanisms(self) -> list[str]:
        """The mechanisms that matter on this device."""
        is_gpu = self._rig.device.type == "cuda"
        return [m.name for m in MECHANISMS.values() if is_gpu or not m.is_for_gpu]

    def checks(self) -> Iterator[Check]:
        """Yield the checks: loading, the reference, each level alone, and all levels as configured."""
        yield Check(MODEL, "Loading the model", None, None, LOADING_DEADLINE_S, self._load, is_needed=True)
        if not self.is_loaded:  # too little memory, for example: reported already, and no level is at fault
            return
        title = "Answers with everything on its lowest level"
        yield Check(
            f"{ANSWERS}-lowest", title, None, None, LOADING_DEADLINE_S, self._answer_lowest, is_needed=True
        )
        if self._lowest_s is None:
            return
        deadline_s = LEAST_DEADLINE_S + DEADLINE_FACTOR * self._lowest_s
        for name in self._levels_to_try():
            for level in MECHANISMS[name].levels[:-1]:
                yield Check(
                    f"{ANSWERS}-{name}-{level.name}",
                    f"Answers: {MECHANISMS[name].title}, {level.what}",
                    name,
                    level.name,
                    deadline_s,
                    partial(self._compare, alone(name, level.name, self.mechanisms)),
                )
        title = "Answers with everything as it stands"
        yield Check(ANSWERS, title, None, None, deadline_s, self._compare)

    def _levels_to_try(self) -> Sequence[str]:
        if self._rig.subject.is_quick:  # a first start: the kernels have been checked separately
            return ["graphs"] if "graphs" in self.mechanisms else []
        return self.mechanisms

    @cached_property
    def model(self) -> LoadedModel:
        """The model; for a quick check, few layers of its shape with random weights."""
        subject, rig = self._rig.subject, self._rig
        if not subject.is_quick:
            return load(
                EngineOptions(
                    model=subject.model,
                    device=rig.device.type,
                    dtype=str(rig.dtype).removeprefix("torch."),
                    shape=subject.shape,
                    gpu_slice=subject.gpu_slice,
                )
            )
        config = quick_shape(rig.config)
        streams = open_streams(rig.device, subject.gpu_slice)
        with streams.on_device():
            decoder = random_model(config, dtype=rig.dtype, device=rig.device)
        return LoadedModel("quick", config, decoder, ByteTokenizer(), streams)

    @cached_property
    def reference(self) -> list[Completion]:
        """Outputs at the lowest levels, with the most probable tokens per position."""
        with on_levels(lowest(self.mechanisms)):
            return self.answer("gpu-only", replace(GREEDY, logprobs=20))

    def answer(self, policy: str, params: SamplingParams = GREEDY) -> list[Completion]:
        """Return the outputs for all prompts at the current levels."""
        config = self.model.config
        longest = min(config.max_context_tokens, CACHE_TOKENS) - ANSWER_TOKENS - 1
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(config.vocab_size, (min(count, longest),), generator=generator).tolist()
            for count in PROMPT_TOKENS
        ]
        with Engine.from_parts(self._memory(policy), policy) as engine:
            return engine.generate(prompts, params)

    def _memory(self, policy: str) -> EngineParts:
        options = EngineOptions(
            policy=policy,
            gpu_cache_tokens=CACHE_TOKENS,
            cpu_cache_tokens=CACHE_TOKENS,
            max_batch_requests=MAX_REQUESTS,
        )
        return take_memory(self.model, options)

    def _load(self) -> Figures:
        weight_bytes = self.model.decoder.nbytes
        self.is_loaded = True
        return {"weight_bytes": weight_bytes}

    def _answer_lowest(self) -> Figures:
        started = time.perf_counter()
        tokens = sum(len(answer.token_ids) for answer in self.reference)
        self._lowest_s = time.perf_counter() - started
        return {"tokens": tokens}

    def _compare(self, levels: Mapping[str, str] | None = None) -> Figures:
        reference = self.reference
        with on_levels(levels or {}):
            answers = [answer for policy in POLICIES for answer in self.answer(policy)]
        figures: dict[str, Figure] = {"same_tokens": 0, "ties": 0}
        for index, (answer, expected) in enumerate(zip(answers, reference * len(POLICIES), strict=True)):
            same = _same(answer.token_ids, expected.token_ids)
            figures["same_tokens"] = int(figures["same_tokens"]) + same
            if same == len(expected.token_ids):
                continue
            margin = _margin(expected, same, answer.token_ids[same])
            if not margin <= TIES[self._rig.dtype]:
                raise CheckError(
                    f"token {same + 1} of answer {index % len(reference) + 1} differs from the answer at the "
                    f"lowest levels ({POLICIES[index // len(reference)]})",
                    figures,
                )
            figures["ties"] = int(figures["ties"]) + 1
        return figures

    def memory_check(self) -> Check:
        """Return the check of the GPU memory budget: planned against actual use."""
        return Check(MEMORY, "GPU memory: planned and used", None, None, LOADING_DEADLINE_S, self._measure)

    def _measure(self) -> Figures:
        device, config = self._rig.device, self.model.config
        torch.cuda.empty_cache()
        free = FreeMemory.now(device).gpu_bytes or 0
        parts = self._memory("gpu-only")
        kv_bytes = parts.tokens_in(host_memory=False) * config.kv_bytes_per_token(self._rig.dtype)
        activations = activation_bytes(config, parts.limits, self._rig.dtype, device)
        promised = kv_bytes + activations + DEVICE_RESERVE_BYTES
        with Engine.from_parts(parts, "gpu-only") as engine:
            engine.generate([[1] * 100], GREEDY)
            used = free - (FreeMemory.now(device).gpu_bytes or 0)
        figures: dict[str, Figure] = {"promised_bytes": promised, "used_bytes": used}
        if used > promised:
            raise CheckError(
                f"iterations took {(used - promised) / 2**20:.0f} MiB more than was set aside, unless "
                "another program did: leave more free with --gpu-memory",
                figures,
            )
        return figures


def quick_shape(config: ModelConfig) -> ModelConfig:
    """Return a shape with few weights, whose attention and offload transfers are as demanding."""
    layers = min(QUICK_LAYERS, config.num_layers)
    if isinstance(config, TracedConfig):  # the decoder here, with the same attention
        given = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
        given |= {"intermediate_size": QUICK_INTERMEDIATE, "rms_norm_eps": 1e-6}
        config = ModelConfig(**(given | {"experts": None, "state_shapes": (), "kv_parts": 2}))
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            count=min(experts.count, max(QUICK_EXPERTS, experts.per_token)),
            intermediate_size=min(experts.intermediate_size, QUICK_INTERMEDIATE // QUICK_EXPERTS),
            layers=tuple(layer for layer in experts.layers if layer < layers),
        )
    return replace(
        config,
        num_layers=layers,
        layer_windows=config.layer_windows[:layers],
        vocab_size=min(config.vocab_size, QUICK_VOCABULARY),
        intermediate_size=min(config.intermediate_size, QUICK_INTERMEDIATE),
        experts=experts,
        eos_token_ids=(),
        bos_token_id=None,
    )


def lowest(mechanisms: Iterable[str]) -> dict[str, str]:
    """Return the lowest level of every mechanism."""
    return {name: MECHANISMS[name].levels[-1].name for name in mechanisms}


def alone(mechanism: str, level: str, mechanisms: Iterable[str]) -> dict[str, str]:
    """Return levels for all mechanisms: the given one, its requirements, and otherwise the lowest."""
    return lowest(mechanisms) | dict(NEEDS.get(mechanism, {})) | {mechanism: level}


def _same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens at the start."""
    return next(
        (place for place, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b),
        min(len(tokens), len(others)),
    )


def _margin(expected: Completion, place: int, token: int) -> float:
    """Return how much less probable a token was than the chosen one; infinite if it is not listed."""
    chosen = expected.tokens[place]
    logprobs = {top.token_id: top.logprob for top in chosen.top_logprobs}
    best = max(logprobs.values(), default=0.0)
    return best - logprobs[token] if token in logprobs else float("inf")
