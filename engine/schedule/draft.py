"""An iteration in the making, in numbers: what it may hold, what it holds, who could still join."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from neo_desktop.engine.options import MAX_TOKEN_MS
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import Decodes, Load
from neo_desktop.engine.schedule.regime import Regime


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on one iteration."""

    max_batch_tokens: int  # tokens in the linear stages; longer prompts are prefilled in chunks
    max_batch_requests: int  # requests that run at the same time
    max_token_ms: float = MAX_TOKEN_MS  # of a decode at its own pace, per token, as predicted

    def __post_init__(self) -> None:
        if self.max_batch_requests < 1 or self.max_batch_tokens < self.max_batch_requests:
            raise ValueError(
                "max_batch_requests must be at least 1 and max_batch_tokens at least max_batch_requests, got "
                f"{self.max_batch_requests} and {self.max_batch_tokens}"
            )
        if not self.max_token_ms >= 0:
            raise ValueError(f"max_token_ms must be at least 0, got {self.max_token_ms}")


class HostQueue:
    """Decodes that the host attends for, in the order in which iterations take them.

    Args:
        contexts: (where its KV lies, its context tokens) of each.
    """

    def __init__(self, contexts: Sequence[tuple[Place, int]]) -> None:
        self.contexts = contexts
        self._sums: list[tuple[Place, Sequence[int], Sequence[int]]] = []  # (place, decodes, tokens before)
        if not contexts:
            return
        places, tokens = zip(*contexts, strict=True)
        if places.count(places[0]) == len(places):
            sums = list(accumulate(tokens, initial=0))
            self._sums.append((places[0], range(len(sums)), sums))
            return
        for place in dict.fromkeys(places):
            is_here = [each == place for each in places]
            here = [each * is_one for each, is_one in zip(tokens, is_here, strict=True)]
            self._sums.append((place, [0, *accumulate(is_here)], [0, *accumulate(here)]))

    def __len__(self) -> int:
        return len(self.contexts)

    def decodes(self, positions: Sequence[int]) -> dict[Place, Decodes]:
        """Return `place -> those of these decodes whose KV lies there`."""
        found: dict[Place, Decodes] = {}
        if isinstance(positions, range):
            for place, counts, tokens in self._sums:
                requests = counts[positions.stop] - counts[positions.start]
                if requests:
                    found[place] = Decodes(requests, tokens[positions.stop] - tokens[positions.start])
            return found
        for position in positions:
            place, context_tokens = self.contexts[position]
            requests, before = found.get(place, (0, 0))
            found[place] = Decodes(requests + 1, before + context_tokens)
        return found

    def host_ms(self, cost: CostModel, begin: int, end: int) -> float:
        """Return what the decodes `begin .. end - 1` take the host; see `estimate.host_ms`.

        Most of what is decided is found out by this number, for one part of the queue after the other.
        """
        ms, num_all, worker_ms = 0.0, 0, 0.0
        for place, counts, tokens in self._sums:
            requests = counts[end] - counts[begin]
            if requests:
                num_all += requests
                here_ms = cost.attention_ms(place, requests, tokens[end] - tokens[begin])
                if place.is_remote:
                    worker_ms = max(worker_ms, here_ms + cost.way_ms(place, requests).all)
                else:
                    ms += here_ms
        return max(ms, worker_ms) + cost.hand_off_ms(num_all) if num_all else 0.0

    def tokens(self, begin: int, end: int) -> int:
        """Return the context tokens of the decodes `begin .. end - 1`."""
        return sum(tokens[end] - tokens[begin] for _, _, tokens in self._sums)


class Chunk(NamedTuple):
    """Some tokens of a prompt."""

    tokens: int
    prefill_ms: float  # T_pf of one layer; 0 where a single token is a decode
    rows: int  # to be sampled: 1 if it is the prompt's last


@dataclass(slots=True)
class Draft:
    """What an iteration holds so far."""

    cost: CostModel
    limits: SchedulerLimits
    budget: int  # tokens that may still be added
    load: Load  # of sub-batch 0, without the queue
    queue: HostQueue = field(default_factory=lambda: HostQueue(()))
    num_due: int = 0  # how many at the front of the queue waited so long that they join at any price
    moved_tokens: int = 0  # whose KV crosses the bus beside the computation; see `iteration_ms`
    num_waiting: int = 0  # prompts that live nowhere yet
    mean_prompt_tokens: float = 0.0
    num_running: int = 0  # requests that live somewhere
    num_on_host: int = 0  # those whose decodes the host attends for
    most_on_device: int = 0  # requests like those that came, that the preferred place has memory for
    num_swapped: int = 0  # those whose KV comes from host memory to the device
    residents: Mapping[Place, Decodes] = field(default_factory=dict)  # who lives where, as typical decodes
    staggered: Mapping[Place, Decodes] = field(default_factory=dict)  # decodes at their own pace, under way
    regime: Regime | None = None  # what is best in the long run; None: nobody asked
    chunks: list[Chunk] = field(default_factory=list)
    most_per_prompt: int | None = None  # tokens of a prompt; None: any number

    def add_chunk(self, place: Place, tokens: int, start: int, num_tokens: int) -> None:
        """Add tokens of a request.

        Args:
            place: where it lives.
            tokens: how many, within the budget.
            start: how many are computed already.
            num_tokens: how many the request has.
        """
        load = self.load
        is_last = start + tokens == num_tokens
        prefill_ms = 0.0
        if tokens > 1:
            prefill_ms = self.cost.prefill_attention_ms(tokens, start)
            self.load = Load(
                load.tokens + tokens,
                load.rows + is_last,
                load.prefill_ms + prefill_ms,
                load.decodes,
                # It attends to what is before it, which comes, and its own leaves.
                load.fetched + (start if place.is_swapped else 0),
                load.stored + (tokens if place.is_swapped else 0),
            )
        else:  # for the kernels, a single token is a decode
            self.load = load.plus({place: Decodes(1, start + 1)})._replace(rows=load.rows + is_last)
        self.budget -= tokens
        self.chunks.append(Chunk(tokens, prefill_ms, int(is_last)))
        if place.host_attends:
            self.moved_tokens += tokens

    @property
    def num_chunk_tokens(self) -> int:
        """Of prompts."""
        return sum(chunk.tokens for chunk in self.chunks)
