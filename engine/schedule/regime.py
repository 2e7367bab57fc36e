"""What serves a load best in the long run: where requests live, how much of prompts an iteration computes.

In the long run each token that is decoded brings some tokens of prompts with it, of the requests to come. A
regime is an iteration that computes as much of both. Which one has the highest rate depends on where time is
lost otherwise:

- iterations without enough tokens read weights for little: prompts fill them up, in small chunks;
- the CPU attends only beside the device's work: with the prompts of an iteration in two sub-batches, each of
  which is large enough to be worth reading the weights for, both always have something to do;
- where two sub-batches are too small for that, decodes at their own pace (see `cohorts`) keep the CPU busy
  beside a single one;
- the bus brings KV to the device beside all of that: as much as hides, of requests that then need neither its
  memory nor the CPU's time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import (
    Decodes,
    OnHost,
    Times,
    staggered_on_host,
    staggered_rows,
    swap_both_ms,
    times_ms,
    times_of,
    times_on_host,
)

COUNT_STEP = 1.3  # between the numbers of CPU decodes that are tried
KEY_STEP = 1.1  # a load that has changed by less has the same regime
# A regime that needs the host must be so much better: to fill its memory takes long, and predictions err.
WORTH_FILLING = 1.03


class Kind(Enum):
    """How an iteration divides its work."""

    ONE = auto()  # one sub-batch
    DECODES_APART = auto()  # NEO's two: all prompts in sub-batch 0, the CPU's decodes in sub-batch 1
    PROMPTS_IN_BOTH = auto()


@dataclass(frozen=True, slots=True)
class Demand:
    """A load, and the memory for it. Counts are of requests."""

    device: Place | None  # the first place whose decodes the device attends for; None: there is none
    host: Place | None  # likewise the host
    most_on_device: int
    most_on_host: int
    prompt_tokens: float  # of one
    context_tokens: float  # of one, as a decode
    prompts_per_decode: float  # tokens
    max_chunk_tokens: int
    max_token_ms: float  # see `SchedulerLimits`
    workers: tuple[tuple[Place, int], ...] = ()  # the requests that each may have
    most_swapped: int = 0  # requests whose KV may come to the device in each iteration
    most_elsewhere: float = math.inf  # of these, and those on the host and workers, together

    @property
    def most_beside_device(self) -> int:
        """Requests that the host and workers may have."""
        return self.most_on_host + sum(most for _, most in self.workers)

    def beside_device(self, count: int) -> Mapping[Place, Decodes]:
        """Return so many decodes on the host and workers; each has its share, by its memory."""
        places = [*self.workers, *([] if self.host is None else [(self.host, self.most_on_host)])]
        found = {}
        for place, most in places:
            if share := -(-count * most // self.most_beside_device) if count else 0:
                found[place] = Decodes(share, share * int(self.context_tokens))
        return found

    @property
    def key(self) -> tuple[int, ...]:
        """What similar ones have in common."""
        sizes = (
            self.most_on_device,
            self.most_on_host,
            self.most_swapped,
            self.prompt_tokens,
            self.context_tokens,
            self.prompts_per_decode,
            *(most for _, most in self.workers),
        )
        return tuple(round(math.log(max(size, 1e-3), KEY_STEP)) for size in sizes)


@dataclass(frozen=True, slots=True)
class Regime:
    """An iteration that could go on for ever; see above."""

    kind: Kind
    num_device: int  # decodes that the device attends for
    num_host: int  # decodes that the host or workers attend for within the iteration
    num_staggered: int  # decodes at their own pace, of the host; see `policies.Fastest` for those of workers
    chunk_tokens: float
    ms: float
    num_decoded: float  # tokens
    # What a token is worth, in ms: prompts what more of them would take, decodes the rest.
    prompt_ms: float = 0.0
    decode_ms: float = 1.0
    num_swapped: int = 0  # of the device's, those whose KV comes from host memory

    @property
    def num_on_host(self) -> int:
        """Requests that live in host memory."""
        return self.num_host + self.num_staggered

    @property
    def rate(self) -> float:
        """Tokens decoded per ms."""
        return self.num_decoded / self.ms if self.ms else self.num_decoded


class RegimeFinder:
    """Finds the best regime, again when the load has changed.

    Args:
        cost: predicts.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._key: tuple[int, ...] | None = None
        self._best: Regime | None = None

    def best(self, demand: Demand) -> Regime:
        """Return the regime with the highest rate."""
        if self._best is None or self._key != demand.key:
            self._key, self._best = demand.key, self._find(demand)
        return self._best

    def _find(self, demand: Demand) -> Regime:
        alone = self._regime(demand, Kind.ONE, 0, 0)
        if not demand.most_swapped:
            return self._priced(demand, self._better(alone, self._others(demand, 0)))
        # One thing after the other: without the host; what is best with it, and swapped beside that; then the
        # host's beside what is swapped.
        without = self._better(alone, self._with_swapped(demand, alone))
        best = self._better(alone, self._others(demand, 0))
        best = self._better(best, self._with_swapped(demand, best))
        for count in {best.num_swapped, without.num_swapped} - {0}:
            best = self._better(best, self._others(demand, count))
        if best.rate < without.rate * WORTH_FILLING:
            best = without
        return self._priced(demand, best)

    def _better(self, best: Regime, others: Iterable[Regime]) -> Regime:
        return max((best, *others), key=lambda regime: regime.rate)

    def _with_swapped(self, demand: Demand, regime: Regime) -> Iterator[Regime]:
        """Yield a regime with any number of decodes whose KV comes to the device, and fewer of the CPU's."""
        num_host, num_staggered = regime.num_host, regime.num_staggered
        for count in _counts(demand.most_swapped):
            left = int(min(demand.most_elsewhere - count, demand.most_beside_device))
            on_host = min(num_host, left)
            yield self._regime(demand, regime.kind, on_host, min(num_staggered, left - on_host), count)

    def _others(self, demand: Demand, num_swapped: int) -> Iterator[Regime]:
        most = int(min(demand.most_beside_device, demand.most_elsewhere - num_swapped))
        for num_host in _counts(most):
            left = min(most - num_host, demand.most_on_host)
            for num_staggered in (0, left) if self._cost.overlaps else (0,):
                regime = self._regime(demand, Kind.ONE, num_host, num_staggered, num_swapped)
                if (self._cost.num_layers + 1) * regime.ms <= demand.max_token_ms or not regime.num_staggered:
                    yield regime
            if num_host > 1:
                yield self._regime(demand, Kind.PROMPTS_IN_BOTH, num_host, 0, num_swapped)
                yield self._regime(demand, Kind.DECODES_APART, num_host, 0, num_swapped)

    def _regime(
        self, demand: Demand, kind: Kind, num_host: int, num_staggered: int, num_swapped: int = 0
    ) -> Regime:
        num_device = demand.most_on_device + num_swapped
        num_decoded = num_device + num_host + num_staggered / self._cost.num_layers
        chunk_tokens = num_decoded * demand.prompts_per_decode
        regime = Regime(
            kind,
            num_device,
            num_host,
            num_staggered,
            chunk_tokens,
            0.0,
            num_decoded,
            num_swapped=num_swapped,
        )
        return replace(regime, ms=self._ms(demand, regime))

    def _priced(self, demand: Demand, regime: Regime) -> Regime:
        """Find out what tokens are worth: together as much as the iteration takes."""
        chunk_tokens, ms = regime.chunk_tokens, regime.ms
        if not regime.num_decoded or not ms:
            return regime
        prompt_ms = 0.0
        if chunk_tokens:
            more = 1.02 * chunk_tokens + 8
            longer_ms = self._ms(demand, replace(regime, chunk_tokens=more))
            prompt_ms = min((longer_ms - ms) / (more - chunk_tokens), ms / chunk_tokens)
        decode_ms = (ms - prompt_ms * chunk_tokens) / regime.num_decoded
        return replace(regime, prompt_ms=prompt_ms, decode_ms=decode_ms)

    def _ms(self, demand: Demand, regime: Regime) -> float:
        """Predict the iteration; what exceeds the longest chunk makes another one."""
        cost, num_device, num_host = self._cost, regime.num_device, regime.num_host
        chunk_tokens = min(regime.chunk_tokens, demand.max_chunk_tokens)
        context_tokens = int(demand.context_tokens)
        attention_ms = 0.0
        if demand.device is not None:
            attention_ms = cost.attention_ms(demand.device, num_device, num_device * context_tokens)
        staggered: dict[Place, Decodes] = {}
        if demand.host is not None and regime.num_staggered:
            staggered[demand.host] = Decodes(regime.num_staggered, regime.num_staggered * context_tokens)
        rows = staggered_rows(cost, staggered)

        def beside(count: int) -> OnHost:
            return times_on_host(cost, demand.beside_device(count))

        prompt_tokens = max(int(demand.prompt_tokens), 1)
        prefill_ms = chunk_tokens * cost.prefill_attention_ms(prompt_tokens, 0) / prompt_tokens
        others = (regime.chunk_tokens - chunk_tokens) / demand.max_chunk_tokens
        other_ms = (
            cost.num_layers * (cost.linear_ms(demand.max_chunk_tokens) + prefill_ms) + cost.iteration_ms
        )
        tokens = num_device + int(chunk_tokens)
        second: Times | None = None
        if regime.kind is Kind.ONE:
            all_tokens = tokens + num_host + rows
            first = times_of(cost, all_tokens, attention_ms + prefill_ms, beside(num_host))
        elif regime.kind is Kind.DECODES_APART:
            first = times_of(cost, tokens, attention_ms + prefill_ms)
            second = times_of(cost, num_host, 0.0, beside(num_host))
        else:
            half, of_host = (tokens + num_host) // 2, num_host - num_host // 2
            first = times_of(cost, half, attention_ms + prefill_ms / 2, beside(of_host))
            second = times_of(cost, half, prefill_ms / 2, beside(num_host // 2))
        sampled = num_device + num_host + rows
        # Prompts of those who will live in host memory go there over the bus.
        on_host = num_host + regime.num_staggered / cost.num_layers
        moved_tokens = int(chunk_tokens * on_host / regime.num_decoded) if on_host else 0
        of_swapped = chunk_tokens * regime.num_swapped / regime.num_decoded if regime.num_swapped else 0.0
        copies_ms = cost.transfer_ms(moved_tokens)
        stored = regime.num_swapped + int(of_swapped)
        copies_ms += swap_both_ms(cost, regime.num_swapped * context_tokens, stored)
        own = staggered_on_host(cost, staggered)
        return times_ms(cost, first, second, sampled, copies_ms, own) + others * other_ms


def _counts(most: int) -> Iterator[int]:
    """Yield 0, 1, 2, ... up to `most`, in growing steps."""
    count = 0
    while count < most:
        yield count
        count = max(count + 1, int(count * COUNT_STEP))
    yield most
