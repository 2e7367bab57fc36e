"""How long an iteration takes, from what its sub-batches hold.

Per layer, with sub-batches 0 and 1 (NEO, section 3.2; `device_i` is T_pf + T_ga of sub-batch i):

    device   | linear 0, device 1 | linear 1, device 0 |
    host     | host attention 1   | host attention 0   |
               <----- stage A --->  <----- stage B --->

With one sub-batch its attention on the host runs beside its own attention on the device, and the linear
stages wait for both.
"""

from collections.abc import Mapping
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
        tokens, rows, prefill_ms, decodes = self
        if decodes:
            more, added = {**decodes, **more}, more
            for place, (requests, context_tokens) in added.items():
                tokens += requests
                rows += requests
                here = decodes.get(place)
                if here is not None:
                    more[place] = Decodes(here.requests + requests, here.context_tokens + context_tokens)
        else:
            for requests, _ in more.values():
                tokens += requests
                rows += requests
        return Load(tokens, rows, prefill_ms, more)


def costs_of(cost: CostModel, *loads: Load, swapped_tokens: int = 0) -> CostModel:
    """Return the times that hold for an iteration: decodes alone may be a graph. See `iteration_ms`."""
    most = 0
    for load in loads:
        if swapped_tokens or load.tokens != load.num_decodes:
            return cost
        most = max(most, load.tokens)
    with_host = False
    for load in loads:
        for place in load.decodes:
            with_host = with_host or place.host_attends
    return cost.of_decodes(most, with_host)


def device_attention_ms(cost: CostModel, load: Load) -> float:
    """T_pf + T_ga of one layer."""
    ms = load.prefill_ms
    for place, (requests, context_tokens) in load.decodes.items():
        if not place.host_attends:
            ms += cost.attention_ms(place, requests, context_tokens)
    return ms


def host_ms(cost: CostModel, load: Load) -> float:
    """T_ca of one layer, with the way there and back."""
    ms, requests = 0.0, 0
    for place, decodes in load.decodes.items():
        if place.host_attends:
            ms += cost.attention_ms(place, *decodes)
            requests += decodes.requests
    return ms + cost.hand_off_ms(requests)


def iteration_ms(cost: CostModel, *loads: Load, swapped_tokens: int = 0) -> float:
    """Predict an iteration.

    Args:
        loads: of sub-batch 0, and of sub-batch 1 if there is one.
        swapped_tokens: tokens whose KV crosses the bus, layer by layer, beside the computation.
    """
    cost = costs_of(cost, *loads, swapped_tokens=swapped_tokens)
    both = max if cost.overlaps else _sum
    first, second = loads[0], loads[-1]
    if len(loads) == 1:
        layer = cost.linear_ms(first.tokens) + both(device_attention_ms(cost, first), host_ms(cost, first))
        rows = first.rows
    else:
        device_ms = cost.linear_ms(first.tokens) + device_attention_ms(cost, second)
        layer = both(device_ms, host_ms(cost, second))  # stage A
        device_ms = cost.linear_ms(second.tokens) + device_attention_ms(cost, first)
        layer += both(device_ms, host_ms(cost, first))  # stage B
        rows = first.rows + second.rows
    if swapped_tokens:
        layer = both(layer, cost.transfer_ms(swapped_tokens))
    return cost.num_layers * layer + cost.head_ms(rows) + cost.iteration_ms


def predict(cost: CostModel, *loads: Load, swapped_tokens: int = 0) -> IterationTiming:
    """Predict an iteration and its attention on the host; see `iteration_ms`."""
    kind = costs_of(cost, *loads, swapped_tokens=swapped_tokens)
    attention_ms = sum(
        kind.attention_ms(place, *decodes)
        for load in loads
        for place, decodes in load.decodes.items()
        if place.host_attends
    )
    return IterationTiming(
        total_ms=iteration_ms(cost, *loads, swapped_tokens=swapped_tokens),
        cpu_attention_ms=attention_ms * cost.num_layers,
        is_graph=kind is not cost,
    )


def _sum(first: float, second: float) -> float:
    return first + second
