"""Finds the steady state with the highest rate: the tiers of requests and the prompt tokens per iteration.

In the long run each decoded token brings some prompt tokens of later requests with it. A steady state is an
iteration that computes both in this proportion. The best one depends on the resource that would be idle:

- An iteration with few tokens reads the weights for little work. Small prompt chunks fill it up.
- The CPU attends only while the device computes. If prompts in two sub-batches make each large enough to
  justify reading the weights, neither CPU nor device waits.
- If two sub-batches are too small for that, async decodes (see `async_groups`) keep the CPU busy beside a
  single batch.
- The bus streams KV to the device while both compute. Streamed requests need neither device memory nor CPU
  time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms

COUNT_STEP = 1.3  # ratio of consecutive counts of CPU decodes to try
KEY_STEP = 1.1  # workloads that differ by less share a steady state
# Filling host memory takes long, and predictions err: a steady state with the host must win by this factor.
WORTH_FILLING = 1.03


class Kind(Enum):
    """Partition of an iteration's work."""

    ONE = auto()  # one sub-batch
    DECODES_APART = auto()  # NEO's two: all prompts in sub-batch 0, the CPU's decodes in sub-batch 1
    PROMPTS_IN_BOTH = auto()


@dataclass(frozen=True, slots=True)
class Workload:
    """Request sizes, and the number of requests that memory allows per tier."""

    device: KVTier | None  # first tier attended by the device; None: there is no device tier
    host: KVTier | None  # tier attended by the CPU; None: there is no CPU tier
    most_on_device: int
    most_on_host: int
    prompt_tokens: float  # mean prompt length
    context_tokens: float  # mean context of a decode
    prompts_per_decode: float  # prompt tokens per decoded token
    max_chunk_tokens: int
    max_token_ms: float  # see `SchedulerLimits`
    workers: tuple[tuple[KVTier, int], ...] = ()  # (tier, most requests) per worker
    most_streamed: int = 0  # streamed requests per iteration
    most_elsewhere: float = math.inf  # streamed, host and worker requests together

    @property
    def whole_chunk_tokens(self) -> float:
        """Tokens of a whole prompt, or of the longest chunk."""
        return min(self.prompt_tokens, self.max_chunk_tokens)

    @property
    def most_beside_device(self) -> int:
        """Limit on requests of host and workers together."""
        return self.most_on_host + sum(most for _, most in self.workers)

    def beside_device(self, count: int) -> Mapping[KVTier, Decodes]:
        """Return `count` decodes divided among host and workers in proportion to their memory."""
        tiers = [*self.workers, *([] if self.host is None else [(self.host, self.most_on_host)])]
        decodes = {}
        for tier, most in tiers:
            if share := -(-count * most // self.most_beside_device) if count else 0:
                decodes[tier] = Decodes(share, share * int(self.context_tokens))
        return decodes

    @property
    def key(self) -> tuple[int, ...]:
        """Rounded logarithms of the sizes: similar workloads have equal keys."""
        sizes = (
            self.most_on_device,
            self.most_on_host,
            self.most_streamed,
            self.prompt_tokens,
            self.context_tokens,
            self.prompts_per_decode,
            *(most for _, most in self.workers),
        )
        return tuple(round(math.log(max(size, 1e-3), KEY_STEP)) for size in sizes)


@dataclass(frozen=True, slots=True)
class SteadyState:
    """An iteration that can repeat for ever, at the workload's proportion of prompts and decodes."""

    kind: Kind
    num_device: int  # decodes attended by the device
    num_host: int  # decodes attended by the host or workers within the iteration
    num_async: int  # async decodes of the host; `policies.Fastest` explains why workers have none
    chunk_tokens: float
    ms: float
    num_decoded: float  # tokens decoded per iteration
    # Value of a token in ms. A prompt token's is its marginal prefill time; decoded tokens share the rest.
    prompt_ms: float = 0.0
    decode_ms: float = 1.0
    num_streamed: int = 0  # streamed decodes, which are part of `num_device`
    # True if prompts run whole: few iterations have them, because launching them is slow.
    has_whole_prompts: bool = False

    @property
    def num_on_host(self) -> int:
        """Requests whose KV is in host memory for the CPU or in a worker."""
        return self.num_host + self.num_async

    @property
    def rate(self) -> float:
        """Decoded tokens per ms."""
        return self.num_decoded / self.ms if self.ms else self.num_decoded


class SteadyStateFinder:
    """Finds the best steady state, and again after the workload or the correction has changed."""

    def __init__(self, cost: TableCostModel) -> None:
        self._cost = cost
        self._key: tuple[int, ...] | None = None
        self._steps: tuple[float, ...] = ()  # of the correction
        self._best: SteadyState | None = None

    def best(self, workload: Workload) -> SteadyState:
        key, steps = workload.key, self._cost.correction.steps
        has_moved = any(abs(now - then) >= 1.0 for now, then in zip(steps, self._steps, strict=False))
        if self._best is None or self._key != key or has_moved:
            self._key, self._steps, self._best = key, steps, self._find(workload)
        return self._best

    def _find(self, workload: Workload) -> SteadyState:
        alone = self._steady_state(workload, Kind.ONE, 0, 0)
        if not workload.most_streamed:
            return self._priced(workload, self._better(alone, self._others(workload, 0)))
        # Greedy: the best without the host; the best with it, then with streamed KV; then host decodes
        # beside streamed ones.
        without = self._better(alone, self._with_streamed(workload, alone))
        best = self._better(alone, self._others(workload, 0))
        best = self._better(best, self._with_streamed(workload, best))
        for count in {best.num_streamed, without.num_streamed} - {0}:
            best = self._better(best, self._others(workload, count))
        if best.rate < without.rate * WORTH_FILLING:
            best = without
        return self._priced(workload, best)

    def _better(self, best: SteadyState, others: Iterable[SteadyState]) -> SteadyState:
        return max((best, *others), key=lambda steady_state: steady_state.rate)

    def _with_streamed(self, workload: Workload, steady_state: SteadyState) -> Iterator[SteadyState]:
        """Yield steady states with each possible number of streamed decodes, and fewer CPU decodes."""
        num_host, num_async = steady_state.num_host, steady_state.num_async
        for count in _counts(workload.most_streamed):
            left = int(min(workload.most_elsewhere - count, workload.most_beside_device))
            on_host = min(num_host, left)
            yield self._steady_state(
                workload, steady_state.kind, on_host, min(num_async, left - on_host), count
            )

    def _others(self, workload: Workload, num_streamed: int) -> Iterator[SteadyState]:
        most = int(min(workload.most_beside_device, workload.most_elsewhere - num_streamed))
        for num_host in _counts(most):
            left = min(most - num_host, workload.most_on_host)
            for num_async in (0, left) if self._cost.overlaps else (0,):
                steady_state = self._steady_state(workload, Kind.ONE, num_host, num_async, num_streamed)
                if (
                    self._cost.num_layers + 1
                ) * steady_state.ms <= workload.max_token_ms or not steady_state.num_async:
                    yield steady_state
            if num_host > 1:
                yield self._steady_state(workload, Kind.PROMPTS_IN_BOTH, num_host, 0, num_streamed)
                yield self._steady_state(workload, Kind.DECODES_APART, num_host, 0, num_streamed)

    def _steady_state(
        self, workload: Workload, kind: Kind, num_host: int, num_async: int, num_streamed: int = 0
    ) -> SteadyState:
        num_device = workload.most_on_device + num_streamed
        num_decoded = num_device + num_host + num_async / self._cost.num_layers
        chunk_tokens = num_decoded * workload.prompts_per_decode
        steady_state = SteadyState(
            kind,
            num_device,
            num_host,
            num_async,
            chunk_tokens,
            0.0,
            num_decoded,
            num_streamed=num_streamed,
        )
        steady_state = replace(steady_state, ms=self._ms(workload, steady_state))
        if self._cost.launch_ms and chunk_tokens < workload.whole_chunk_tokens:
            whole = replace(steady_state, has_whole_prompts=True)
            whole = replace(whole, ms=self._ms(workload, whole))
            steady_state = self._better(steady_state, (whole,))
        return steady_state

    def _priced(self, workload: Workload, steady_state: SteadyState) -> SteadyState:
        """Assign a value to tokens, so that together they are worth the time of the iteration."""
        chunk_tokens, ms = steady_state.chunk_tokens, steady_state.ms
        if not steady_state.num_decoded or not ms:
            return steady_state
        prompt_ms = 0.0
        if chunk_tokens:
            more = 1.02 * chunk_tokens + 8
            longer_ms = self._ms(workload, replace(steady_state, chunk_tokens=more))
            prompt_ms = min((longer_ms - ms) / (more - chunk_tokens), ms / chunk_tokens)
        decode_ms = (ms - prompt_ms * chunk_tokens) / steady_state.num_decoded
        return replace(steady_state, prompt_ms=prompt_ms, decode_ms=decode_ms)

    def _ms(self, workload: Workload, steady_state: SteadyState) -> float:
        """Predict the mean iteration time."""
        if not steady_state.has_whole_prompts:
            return self._each_ms(workload, steady_state)
        most = workload.whole_chunk_tokens
        share = min(steady_state.chunk_tokens / most, 1.0)
        with_prompt, without = (
            self._each_ms(workload, replace(steady_state, chunk_tokens=tokens)) for tokens in (most, 0.0)
        )
        return share * with_prompt + (1 - share) * without

    def _each_ms(self, workload: Workload, steady_state: SteadyState) -> float:
        """Predict equal iterations; prompt tokens beyond the longest chunk run in further ones."""
        cost, num_device, num_host = self._cost, steady_state.num_device, steady_state.num_host
        chunk_tokens = min(steady_state.chunk_tokens, workload.max_chunk_tokens)
        context_tokens, prompt_tokens = int(workload.context_tokens), max(int(workload.prompt_tokens), 1)
        prefill_ms = chunk_tokens * cost.prefill_attention_ms(prompt_tokens, 0) / prompt_tokens

        def chunk_of(num_decodes: float) -> int:
            """Return the prompt tokens of requests that will decode like these."""
            return int(chunk_tokens * num_decodes / steady_state.num_decoded) if num_decodes else 0

        on_device = {}
        if workload.device is not None:
            on_device[workload.device] = Decodes(num_device, num_device * context_tokens)
        device = BatchShape(
            num_device + int(chunk_tokens),
            num_device,
            prefill_ms,
            on_device,
            steady_state.num_streamed * context_tokens,
            steady_state.num_streamed + chunk_of(steady_state.num_streamed),
        )
        if steady_state.kind is Kind.ONE:
            batches: tuple[BatchShape, ...] = (device.plus(workload.beside_device(num_host)),)
        elif steady_state.kind is Kind.DECODES_APART:
            batches = device, BatchShape().plus(workload.beside_device(num_host))
        else:
            half = (device.tokens + num_host) // 2
            second = BatchShape(prefill_ms=prefill_ms / 2).plus(workload.beside_device(num_host // 2))
            device = device._replace(prefill_ms=prefill_ms / 2)
            first = device.plus(workload.beside_device(num_host - num_host // 2))
            batches = first._replace(tokens=half), second._replace(tokens=half)
        async_decodes = {}
        if workload.host is not None and steady_state.num_async:
            num_async = steady_state.num_async
            async_decodes[workload.host] = Decodes(num_async, num_async * context_tokens)
        # The KV of prompts that will decode on the host crosses the bus.
        moved_tokens = chunk_of(num_host + steady_state.num_async / cost.num_layers)
        shape = IterationShape(batches, moved_tokens, async_decodes)
        other_ms = (
            cost.num_layers * (cost.linear_ms(workload.max_chunk_tokens) + prefill_ms) + cost.outside_ms
        )
        others = (steady_state.chunk_tokens - chunk_tokens) / workload.max_chunk_tokens
        return iteration_ms(cost, shape) + others * other_ms


def _counts(most: int) -> Iterator[int]:
    """Yield 0, 1, 2, ..., `most`, in growing steps."""
    count = 0
    while count < most:
        yield count
        count = max(count + 1, int(count * COUNT_STEP))
    yield most
