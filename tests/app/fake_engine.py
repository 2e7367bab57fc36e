"""The real engine around an executor that writes the alphabet and can be held or broken."""

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from neo_desktop.engine.batch import IterationPlan, IterationResult, SampledToken, SamplingInput, TokenLogprob
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.models.config import GenerationDefaults, ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.rope import RopeConfig
from neo_desktop.models.tokenizer import ByteTokenizer, Tokenizer

MODEL = "alphabet"
CONTEXT_TOKENS = 512
BLOCK_SIZE = 16
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('that I will not read') }}{% endif %}"
    "<assistant>"
)


@dataclass
class FakeExecutor(Executor):
    """Executor whose n-th output token is the n-th letter, independent of the last prompt token.

    An iteration needs `open` to be set, or else one of `steps`; `error` breaks it. The first iteration sets
    `begun`. `seen` collects the sampling inputs, `prompts` every request's computed tokens.
    """

    open: threading.Event = field(default_factory=threading.Event)
    steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    begun: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    seen: list[SamplingInput] = field(default_factory=list)
    prompts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open.set()

    def start(self, plan: IterationPlan) -> Wait:
        return partial(self._carry_out, plan)

    def _carry_out(self, plan: IterationPlan) -> IterationResult:
        self.begun.set()
        for _ in range(3000):
            if self.open.wait(0.005) or self.steps.acquire(timeout=0.005):
                break
        else:
            raise AssertionError("an iteration was held and never let go")
        if self.error is not None:
            raise self.error
        sampled = {}
        for sequence in plan.sequences:
            known = self.prompts.setdefault(sequence.request_id, [])
            del known[sequence.start :]
            known += sequence.token_ids
            if sequence.sampling is not None:
                self.seen.append(sequence.sampling)
                sampled[sequence.request_id] = self._token(sequence.request_id, sequence.sampling)
        return IterationResult(sampled, {})

    def _token(self, request_id: str, sampling: SamplingInput) -> SampledToken:
        return letter(sampling)

    def close(self) -> None:
        pass


@dataclass
class ScriptedExecutor(FakeExecutor):
    """Executor that writes one given answer per prompt, the last one for all later prompts, and ends."""

    answers: list[str] = field(default_factory=lambda: ["yes"])
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    _begun: dict[str, tuple[list[int], int]] = field(default_factory=dict)  # request -> answer, its position

    def _token(self, request_id: str, sampling: SamplingInput) -> SampledToken:
        if request_id not in self._begun:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            tokens = [*self.tokenizer.encode(answer), *self.tokenizer.eos_token_ids]
            self._begun[request_id] = (tokens, sampling.position)
        tokens, start = self._begun[request_id]
        return SampledToken(tokens[min(sampling.position - start, len(tokens) - 1)])


def letter(sampling: SamplingInput) -> SampledToken:
    """Return a letter that depends on position, seed and choice."""
    shift = sampling.seed + sampling.choice if sampling.params.seed is not None else 0
    token_id = ord("a") + (sampling.position + shift) % 26
    if sampling.params.logprobs is None:
        return SampledToken(token_id)
    top = tuple(TokenLogprob(token_id + i, -0.5 - i) for i in range(sampling.params.logprobs))
    return SampledToken(token_id, TokenLogprob(token_id, -0.5), top)


class _NoDecoder:
    device = torch.device("cpu")
    dtype = torch.float32
    nbytes = 1000


def make_engine(
    executor: FakeExecutor,
    *,
    num_blocks: int = 64,
    template: str | None = TEMPLATE,
    generation: GenerationDefaults | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    tokenizer = tokenizer or ByteTokenizer()
    tokenizer.chat_template = template
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_context_tokens=context_tokens,
        rms_norm_eps=1e-6,
        rope=cast("RopeConfig", None),
        tie_word_embeddings=True,
        layer_windows=(None,),
        dtype=torch.float32,
        eos_token_ids=tokenizer.eos_token_ids,
        generation=generation or GenerationDefaults(),
    )
    policy = get_policy("gpu-only")
    kv_cache = KVCache({KVTier.DEVICE: num_blocks}, BLOCK_SIZE)
    scheduler = Scheduler(kv_cache, policy, SchedulerLimits(max_batch_tokens=256, max_batch_requests=32))
    decoder = cast("Decoder", _NoDecoder())
    model = LoadedModel(MODEL, config, decoder, tokenizer, Streams(decoder.device))
    return Engine(model, scheduler, kv_cache, executor, policy.name)
