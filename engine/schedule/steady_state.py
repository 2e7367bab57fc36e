"""Finds the steady state with the highest rate: the tiers of requests and the prompt tokens per iteration.

In the long run each decoded token brings some prompt tokens of later requests with it. A steady state is an
iteration that computes both in this proportion. The best one depends on what would idle otherwise:

- iterations without enough tokens read weights for little: prompts fill them up, in small chunks;
- the CPU attends only beside the device's work: with the prompts of an iteration in two sub-batches, each of
  which is large enough to be worth reading the weights for, both always have something to do;
- where two sub-batches are too small for that, async decodes (see `async_groups`) keep the CPU busy
  beside a single one;
- the bus brings KV to the device beside all of that: as much as hides, of requests that then need neither its
  memory nor the CPU's time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import (
    Decodes,
    OffDeviceTimes,
    Times,
    async_off_device,
    async_rows,
    off_device_times,
    swap_both_ms,
    times_ms,
    times_of,
)

COUNT_STEP = 1.3  # between the numbers of CPU decodes that are tried
KEY_STEP = 1.1  # a load that has changed by less has the same steady state
# A steady state with the host must be this much better: filling its memory takes long, and predictions err.
WORTH_FILLING = 1.03


class Kind(Enum):
    """How an iteration divides its work."""

    ONE = auto()  # one sub-batch
    DECODES_APART = auto()  # NEO's two: all prompts in sub-batch 0, the CPU's decodes in sub-batch 1
    PROMPTS_IN_BOTH = auto()


@dataclass(frozen=True, slots=True)
class Workload:
    """A load, and the memory for it. Counts are of requests."""

    device: KVTier | None  # the first place whose decodes the device attends for; None: there is none
    host: KVTier | None  # likewise the host
    most_on_device: int
    most_on_host: int
    prompt_tokens: float  # of one
    context_tokens: float  # of one, as a decode
    prompts_per_decode: float  # tokens
    max_chunk_tokens: int
    max_token_ms: float  # see `SchedulerLimits`
    workers: tuple[tuple[KVTier, int], ...] = ()  # the requests that each may have
    most_streamed: int = 0  # requests whose KV may come to the device in each iteration
    most_elsewhere: float = math.inf  # of these, and those on the host and workers, together

    @property
    def most_beside_device(self) -> int:
        """Requests that the host and workers may have."""
        return self.most_on_host + sum(most for _, most in self.workers)

    def beside_device(self, count: int) -> Mapping[KVTier, Decodes]:
        """Return so many decodes on the host and workers; each has its share, by its memory."""
        tiers = [*self.workers, *([] if self.host is None else [(self.host, self.most_on_host)])]
        found = {}
        for tier, most in tiers:
            if share := -(-count * most // self.most_beside_device) if count else 0:
                found[tier] = Decodes(share, share * int(self.context_tokens))
        return found

    @property
    def key(self) -> tuple[int, ...]:
        """What similar ones have in common."""
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
    """An iteration that could go on for ever; see above."""

    kind: Kind
    num_device: int  # decodes that the device attends for
    num_host: int  # decodes that the host or workers attend for within the iteration
    num_async: int  # async decodes, of the host; see `policies.Fastest` for those of workers
    chunk_tokens: float
    ms: float
    num_decoded: float  # tokens
    # What a token is worth, in ms: prompts what more of them would take, decodes the rest.
    prompt_ms: float = 0.0
    decode_ms: float = 1.0
    num_streamed: int = 0  # of the device's, those whose KV comes from host memory

    @property
    def num_on_host(self) -> int:
        """Requests that live in host memory."""
        return self.num_host + self.num_async

    @property
    def rate(self) -> float:
        """Tokens decoded per ms."""
        return self.num_decoded / self.ms if self.ms else self.num_decoded


class SteadyStateFinder:
    """Finds the best steady state, again when the load has changed.

    Args:
        cost: predicts.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._key: tuple[int, ...] | None = None
        self._best: SteadyState | None = None

    def best(self, workload: Workload) -> SteadyState:
        """Return the steady state with the highest rate."""
        if self._best is None or self._key != workload.key:
            self._key, self._best = workload.key, self._find(workload)
        return self._best

    def _find(self, workload: Workload) -> SteadyState:
        alone = self._steady_state(workload, Kind.ONE, 0, 0)
        if not workload.most_streamed:
            return self._priced(workload, self._better(alone, self._others(workload, 0)))
        # One thing after the other: without the host; what is best with it, and swapped beside that; then the
        # host's beside what is swapped.
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
        """Yield steady states with any number of streamed decodes, and fewer of the CPU's."""
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
        return replace(steady_state, ms=self._ms(workload, steady_state))

    def _priced(self, workload: Workload, steady_state: SteadyState) -> SteadyState:
        """Find out what tokens are worth: together as much as the iteration takes."""
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
        """Predict the iteration; what exceeds the longest chunk makes another one."""
        cost, num_device, num_host = self._cost, steady_state.num_device, steady_state.num_host
        chunk_tokens = min(steady_state.chunk_tokens, workload.max_chunk_tokens)
        context_tokens = int(workload.context_tokens)
        attention_ms = 0.0
        if workload.device is not None:
            attention_ms = cost.attention_ms(workload.device, num_device, num_device * context_tokens)
        async_decodes: dict[KVTier, Decodes] = {}
        if workload.host is not None and steady_state.num_async:
            async_decodes[workload.host] = Decodes(
                steady_state.num_async, steady_state.num_async * context_tokens
            )
        rows = async_rows(cost, async_decodes)

        def beside(count: int) -> OffDeviceTimes:
            return off_device_times(cost, workload.beside_device(count))

        prompt_tokens = max(int(workload.prompt_tokens), 1)
        prefill_ms = chunk_tokens * cost.prefill_attention_ms(prompt_tokens, 0) / prompt_tokens
        others = (steady_state.chunk_tokens - chunk_tokens) / workload.max_chunk_tokens
        other_ms = (
            cost.num_layers * (cost.linear_ms(workload.max_chunk_tokens) + prefill_ms) + cost.iteration_ms
        )
        tokens = num_device + int(chunk_tokens)
        second: Times | None = None
        if steady_state.kind is Kind.ONE:
            all_tokens = tokens + num_host + rows
            first = times_of(cost, all_tokens, attention_ms + prefill_ms, beside(num_host))
        elif steady_state.kind is Kind.DECODES_APART:
            first = times_of(cost, tokens, attention_ms + prefill_ms)
            second = times_of(cost, num_host, 0.0, beside(num_host))
        else:
            half, of_host = (tokens + num_host) // 2, num_host - num_host // 2
            first = times_of(cost, half, attention_ms + prefill_ms / 2, beside(of_host))
            second = times_of(cost, half, prefill_ms / 2, beside(num_host // 2))
        sampled = num_device + num_host + rows
        # Prompts of those who will live in host memory go there over the bus.
        on_host = num_host + steady_state.num_async / cost.num_layers
        moved_tokens = int(chunk_tokens * on_host / steady_state.num_decoded) if on_host else 0
        streamed_rows = (
            chunk_tokens * steady_state.num_streamed / steady_state.num_decoded
            if steady_state.num_streamed
            else 0.0
        )
        copies_ms = cost.transfer_ms(moved_tokens)
        stored = steady_state.num_streamed + int(streamed_rows)
        copies_ms += swap_both_ms(cost, steady_state.num_streamed * context_tokens, stored)
        own = async_off_device(cost, async_decodes)
        return times_ms(cost, first, second, sampled, copies_ms, own) + others * other_ms


def _counts(most: int) -> Iterator[int]:
    """Yield 0, 1, 2, ... up to `most`, in growing steps."""
    count = 0
    while count < most:
        yield count
        count = max(count + 1, int(count * COUNT_STEP))
    yield most
