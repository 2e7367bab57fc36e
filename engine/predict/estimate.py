"""How long an iteration takes, from what its sub-batches hold.

Per layer, with sub-batches 0 and 1 (NEO, section 3.2; `device_i` is T_pf + T_ga of sub-batch i):

    device   | linear 0, device 1 | linear 1, device 0 |
    host     | host attention 1   | host attention 0   |
               <----- stage A --->  <----- stage B --->

With one sub-batch its attention on the host runs beside its own attention on the device, and the linear
stages wait for both.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import CostModel


class Decodes(NamedTuple):
    """Decodes whose KV lies in one place."""

    requests: int
    context_tokens: int  # theirs, summed


NO_DECODES: Mapping[Place, Decodes] = MappingProxyType({})


class Load(NamedTuple):
    """What one sub-batch brings."""

    tokens: int = 0  # in linear stages
    rows: int = 0  # requests to be sampled
    prefill_ms: float = 0.0  # T_pf of all prompt chunks, one layer
    decodes: Mapping[Place, Decodes] = NO_DECODES  # place -> those whose KV lies there

    @property
    def num_decodes(self) -> int:
        """Decodes in all places."""
        requests = 0
        for decodes in self.decodes.values():
            requests += decodes.requests
        return requests

    def plus(self, more: Mapping[Place, Decodes]) -> "Load":
        """Return this load with further decodes."""
        if not more:
            return self
        requests = 0
        for decodes in more.values():
            requests += decodes.requests
        return Load(
            self.tokens + requests,
            self.rows + requests,
            self.prefill_ms,
            joined(self.decodes, more),
        )


def joined(some: Mapping[Place, Decodes], more: Mapping[Place, Decodes]) -> Mapping[Place, Decodes]:
    """Return the decodes of both."""
    if not some:
        return more
    both = dict(some)
    for place, added in more.items():
        requests, context_tokens = both.get(place, (0, 0))
        both[place] = Decodes(requests + added.requests, context_tokens + added.context_tokens)
    return both


def device_attention_ms(cost: CostModel, load: Load) -> float:
    """T_pf + T_ga of one layer."""
    ms = load.prefill_ms
    for place, (requests, context_tokens) in load.decodes.items():
        if not place.host_attends:
            ms += cost.attention_ms(place, requests, context_tokens)
    return ms


def host_ms(cost: CostModel, decodes: Mapping[Place, Decodes]) -> float:
    """T_ca of one layer, with the way there and back; of those that the host attends for."""
    ms, requests = 0.0, 0
    for place, (here, context_tokens) in decodes.items():
        if place.host_attends:
            ms += cost.attention_ms(place, here, context_tokens)
            requests += here
    return ms + cost.hand_off_ms(requests) if requests else 0.0


class Times(NamedTuple):
    """What a layer of one sub-batch takes, in ms."""

    linear: float
    on_device: float  # attention there
    on_host: float


def times_ms(
    cost: CostModel, first: Times, second: Times | None, rows: int, swapped_tokens: int = 0
) -> float:
    """Return what an iteration takes whose sub-batches take these times."""
    both = max if cost.overlaps else _sum
    if second is None:
        layer = first.linear + both(first.on_device, first.on_host)
    else:
        stage_a = both(first.linear + second.on_device, second.on_host)
        layer = stage_a + both(second.linear + first.on_device, first.on_host)
    if swapped_tokens:
        layer = both(layer, cost.transfer_ms(swapped_tokens))
    return cost.num_layers * layer + cost.head_ms(rows) + cost.iteration_ms


def iteration_ms(cost: CostModel, *loads: Load, swapped_tokens: int = 0) -> float:
    """Predict an iteration.

    Args:
        loads: of sub-batch 0, and of sub-batch 1 if there is one.
        swapped_tokens: tokens whose KV crosses the bus, layer by layer, beside the computation.
    """
    times = [
        Times(cost.linear_ms(load.tokens), device_attention_ms(cost, load), host_ms(cost, load.decodes))
        for load in loads
    ]
    rows = sum(load.rows for load in loads)
    return times_ms(cost, times[0], times[1] if len(times) > 1 else None, rows, swapped_tokens)


def predict(cost: CostModel, *loads: Load, swapped_tokens: int = 0) -> IterationTiming:
    """Predict an iteration and its attention on the host; see `iteration_ms`."""
    return timing_of(cost, iteration_ms(cost, *loads, swapped_tokens=swapped_tokens), loads)


def timing_of(cost: CostModel, total_ms: float, loads: Sequence[Load]) -> IterationTiming:
    """Return the prediction of an iteration that is known to take so long in all."""
    attention_ms = 0.0
    for load in loads:
        for place, (requests, context_tokens) in load.decodes.items():
            if place.host_attends:
                attention_ms += cost.attention_ms(place, requests, context_tokens)
    return IterationTiming(total_ms, attention_ms * cost.num_layers)


def _sum(first: float, second: float) -> float:
    return first + second
