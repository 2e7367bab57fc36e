"""Random iterations of a tiny model, checked against dense attention over the whole context."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from dense_model import logits_of_all
from kv_pools import spoiled
from torch import Tensor
from torch_layer import TorchLayer

from neo_desktop.engine.batch import (
    AsyncGroup,
    BlockCopy,
    IterationPlan,
    IterationResult,
    SamplingInput,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.execute.recurrent import allocate_states
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv.streamed import StreamedPool
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.registry import random_model, stages_of
from neo_desktop.models.shapes import shape
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.weights import named_weights

BLOCK_SIZE = 8
NUM_LAYERS = 4
NUM_STATES = 24
PARAMS = SamplingParams(temperature=0.0, logprobs=3)


def tiny_config(
    windows: tuple[int | None, ...] = (None, 11, None, 3),
    *,
    attention_sinks: bool = False,
    softcap: float | None = None,
) -> ModelConfig:
    """Return a config with grouped-query attention, and a sliding window in some layers."""
    return replace(
        shape("tiny"),
        num_layers=len(windows),
        layer_windows=windows,
        attention_sinks=attention_sinks,
        attention_softcap=softcap,
    )


def tiny_model(
    windows: tuple[int | None, ...] = (None, 11, None, 3),
    device: str = "cpu",
    seed: int = 0,
    form: WeightFormat = DENSE,
    *,
    attention_sinks: bool = False,
    softcap: float | None = None,
) -> Decoder:
    config = tiny_config(windows, attention_sinks=attention_sinks, softcap=softcap)
    model = random_model(config, dtype=torch.float32, device=torch.device("cpu"), seed=seed)
    wide = Decoder(model.config, dtype=torch.float32, device=torch.device(device), form=form)
    for target, source in zip(named_weights(wide), named_weights(model), strict=True):
        # Wide enough that attention decides the next token.
        factor = 8.0 if "_proj" in source.name else 100.0 if "sinks" in source.name else 1.0
        target.load(0, source.dense() * factor)
    return wide


def make_storage(
    model: Decoder,
    num_blocks: Mapping[KVTier, int],
    block_size: int = BLOCK_SIZE,
    *,
    device_kind: type[KVLayer] | None = TorchLayer,
) -> KVStorage:
    """Return pools and states full of NaN, so any read of unwritten memory shows.

    Without a GPU the device's pool has a GPU's layout nevertheless, unless `device_kind` says otherwise
    (None: the engine's choice).
    """
    if model.device.type != "cpu":
        device_kind = None
    devices = dict.fromkeys(num_blocks, model.device) | {KVTier.HOST: torch.device("cpu")}
    kinds = dict.fromkeys(num_blocks, device_kind) | {KVTier.HOST: None}
    return KVStorage(
        {
            tier: spoiled(
                (StreamedPool if tier.is_streamed else KVPool)(
                    model.config,
                    count,
                    block_size,
                    model.dtype,
                    devices[tier],
                    kinds[tier],
                    model.sinks,
                )
            )
            for tier, count in num_blocks.items()
        },
        [state.fill_(torch.nan) for state in allocate_states(model.config, NUM_STATES, model.device)],
    )


def sampling_input(position: int) -> SamplingInput:
    no_tokens = IntArray().view()
    return SamplingInput(PARAMS, 0, 0, position, no_tokens, no_tokens)


_references: WeakKeyDictionary[Decoder, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()


@torch.inference_mode()
def reference_logprobs(model: Decoder, *contexts: list[int]) -> list[Tensor]:
    """Return log-probabilities of the token after each context, without a KV cache or a kernel.

    A model's references are kept: plans come again, with other devices, orders and failures.
    """
    known = _references.setdefault(model, {})
    keys = [tuple(context) for context in contexts]
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    stages = stages_of(model, None) if isinstance(model, TracedDecoder) else None
    recurrent = bool(model.config.state_shapes)  # its layers read one sequence
    for batch in [[key] for key in missing] if recurrent else filter(None, [missing]):
        lengths = [len(key) for key in batch]
        scores = logits_of_all(model, torch.tensor([*chain(*batch)]), stages=stages, lengths=lengths)
        ends = torch.tensor(lengths, device=scores.device).cumsum(0) - 1
        known |= dict(zip(batch, scores[ends].log_softmax(-1), strict=True))
    return [known[key] for key in keys]


@dataclass
class Request:
    name: str
    token_ids: list[int]
    tier: KVTier
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_async: bool = False  # an async decode in progress
    planned: tuple[int, int] | None = None  # first token, and number of tokens, of the current iteration


class RandomIterations:
    """Requests that arrive, run in chunks of any size, move between tiers and leave, at random.

    Blocks are scarce, and the last freed block is reused first. So within one iteration a move frees a
    block, and another move, a prompt or a decode takes it.
    """

    def __init__(
        self,
        seed: int,
        num_blocks: int = 24,
        tiers: tuple[KVTier, ...] = MEASURED_TIERS,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._rng = random.Random(seed)
        self._block_size = block_size
        self._tiers = tiers
        self._free = {tier: list(range(num_blocks)) for tier in tiers}
        for blocks in self._free.values():
            self._rng.shuffle(blocks)
        self._requests: list[Request] = []
        self._states = StateCache(NUM_STATES, block_size)
        self._num_made = 0

    def plans(self, count: int) -> Iterator[tuple[IterationPlan, dict[str, list[int]]]]:
        """Yield plans, each with the whole context of its sequences."""
        copies: list[BlockCopy] = []
        for _ in range(count):
            self._leave()
            copies += self._move()
            self._join()
            async_groups = self._make_async_groups()
            sequences = [s for request in self._requests if (s := self._schedule(request)) is not None]
            if not sequences and not async_groups:
                continue
            plan = IterationPlan(self._split(sequences), tuple(copies), async_decodes=async_groups)
            copies = []
            yield (
                plan,
                {
                    request.name: request.token_ids[: s.context_len]
                    for s in plan.all_sequences
                    for request in self._requests
                    if request.name == s.request_id
                },
            )

    def take_in(self, result: IterationResult) -> None:
        """Append the sampled tokens to requests without unread tokens."""
        for request in self._requests:
            if request.planned is not None:
                self._states.settle(request.name, (), *request.planned)
                request.planned = None
            if request.num_computed == len(request.token_ids) and request.name in result.sampled:
                request.token_ids.append(result.sampled[request.name].token_id)

    def _leave(self) -> None:
        for request in list(self._requests):
            if len(request.token_ids) > 60 or self._rng.random() < 0.1:
                self._requests.remove(request)
                self._give_up(request)
                self._states.free(request.name)

    def _give_up(self, request: Request) -> None:
        self._rng.shuffle(request.blocks)
        self._free[request.tier].extend(request.blocks)
        request.blocks = []

    def _move(self) -> list[BlockCopy]:
        copies = []
        for request in self._rng.sample(self._requests, len(self._requests)):
            tier = self._rng.choice(self._tiers)
            if tier == request.tier or request.is_async or self._rng.random() < 0.5:
                continue
            if tier.host_attends and request.tier.host_attends:
                continue  # moves start or end on the device
            if len(self._free[tier]) < len(request.blocks):
                continue
            taken = [self._free[tier].pop() for _ in request.blocks]
            copies += [
                BlockCopy(request.tier, old, tier, new)
                for old, new in zip(request.blocks, taken, strict=True)
            ]
            self._give_up(request)
            request.tier, request.blocks = tier, taken
        return copies

    def _join(self) -> None:
        while len(self._requests) < 6 and self._rng.random() < 0.8:
            self._num_made += 1
            tokens = [self._rng.randrange(257) for _ in range(self._rng.randint(1, 40))]
            self._requests.append(Request(f"request {self._num_made}", tokens, self._rng.choice(self._tiers)))
            self._states.admit(self._requests[-1].name, ())

    def _make_async_groups(self) -> tuple[AsyncGroup, ...]:
        """Return the async decodes by stage; none here."""
        return ()

    def _take_blocks(self, request: Request, context_len: int) -> bool:
        """Give a request blocks for `context_len` tokens; return False if too few are free."""
        free = self._free[request.tier]
        needed = -(-context_len // self._block_size) - len(request.blocks)
        if needed > len(free):
            return False
        request.blocks += [free.pop() for _ in range(needed)]
        return True

    def _schedule(self, request: Request) -> ScheduledSequence | None:
        rest = len(request.token_ids) - request.num_computed
        count = self._rng.choice((rest, self._rng.randint(0, rest)))
        context_len = request.num_computed + count
        if count == 0 or request.is_async or not self._take_blocks(request, context_len):
            return None
        start, request.num_computed = request.num_computed, context_len
        request.planned = start, count
        is_sampled = context_len == len(request.token_ids) or self._rng.random() < 0.5
        return ScheduledSequence(
            request.name,
            tuple(request.token_ids[start:context_len]),
            start,
            request.tier,
            IntArray(request.blocks).view(),
            sampling_input(context_len) if is_sampled else None,
            states=self._states.plan(request.name, start, count, is_last=is_sampled),
        )

    def _split(self, sequences: list[ScheduledSequence]) -> tuple[SubBatch, ...]:
        """Split at random into one or two sub-batches, either of which may lack prompts, decodes or both."""
        parts: list[list[ScheduledSequence]] = [[] for _ in range(self._rng.choice((1, 2, 2, 2)))]
        for sequence in sequences:
            self._rng.choice(parts).append(sequence)
        order = self._tiers
        for part in parts:
            part.sort(key=lambda s: (order.index(s.tier), s.is_decode))
        return tuple(SubBatch(tuple(part)) for part in parts)


class FewPrompts(RandomIterations):
    """Requests arrive together: recurrent layers run as graphs only without prompts."""

    def _join(self) -> None:
        if not self._requests:
            super()._join()


def check_random_plans(
    execute: Callable[[IterationPlan], IterationResult],
    model: Decoder,
    iterations: "RandomIterations",
    count: int,
    tolerance: float = 2e-4,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Run `count` random plans and check every result; see `check_result`.

    Args:
        after: called after each plan.
    """
    for plan, contexts in iterations.plans(count):
        result = execute(plan)
        check_result(model, plan, contexts, result, tolerance)
        after()
        iterations.take_in(result)


def check_result(
    model: Decoder,
    plan: IterationPlan,
    contexts: Mapping[str, list[int]],
    result: IterationResult,
    tolerance: float = 2e-4,
) -> None:
    """Check that every sampled sequence has the reference's token and logits."""
    assert not result.failed
    sampled = {s.request_id for s in plan.all_sequences if s.sampling is not None}
    assert result.sampled.keys() == sampled
    references = reference_logprobs(model, *(contexts[name] for name in result.sampled))
    for token, expected in zip(result.sampled.values(), references, strict=True):
        assert token.token_id == int(expected.argmax())
        for top in token.top_logprobs:
            assert abs(top.logprob - float(expected[top.token_id])) < tolerance
