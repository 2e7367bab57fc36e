"""How long an iteration takes, from what its sub-batches hold.

Per layer, with sub-batches 0 and 1 (NEO, section 3.2; `device_i` is T_pf + T_ga of sub-batch i):

    device   | linear 0, device 1 | linear 1, device 0 |
    CPU      | CPU attention 1    | CPU attention 0    |
               <----- stage A --->  <----- stage B --->

With one sub-batch its CPU attention runs beside its own attention on the device, and the linear stages wait
for both.
"""

from dataclasses import dataclass

from neo_desktop.engine.predict.cost_model import CostModel


@dataclass(slots=True)
class Load:
    """What one sub-batch brings."""

    tokens: int = 0  # in linear stages
    rows: int = 0  # requests to be sampled
    prefill_ms: float = 0.0  # T_pf of all prompt chunks, one layer
    gpu_requests: int = 0  # decodes whose KV is on the device
    gpu_context_tokens: int = 0  # theirs, summed
    cpu_requests: int = 0  # decodes whose KV is in host memory
    cpu_context_tokens: int = 0

    def with_cpu_decodes(self, requests: int, context_tokens: int) -> "Load":
        """Return this load and further decodes on the CPU."""
        return Load(
            self.tokens + requests,
            self.rows + requests,
            self.prefill_ms,
            self.gpu_requests,
            self.gpu_context_tokens,
            self.cpu_requests + requests,
            self.cpu_context_tokens + context_tokens,
        )


def costs_of(cost: CostModel, load: Load, other: Load | None = None, swapped_tokens: int = 0) -> CostModel:
    """Return the times that hold for an iteration: decodes alone may be a graph. See `iteration_ms`."""
    loads = (load,) if other is None else (load, other)
    if swapped_tokens or any(each.tokens != each.gpu_requests + each.cpu_requests for each in loads):
        return cost
    return cost.of_decodes(max(each.tokens for each in loads), any(each.cpu_requests for each in loads))


def device_attention_ms(cost: CostModel, load: Load) -> float:
    """T_pf + T_ga of one layer."""
    return load.prefill_ms + cost.gpu_attention_ms(load.gpu_requests, load.gpu_context_tokens)


def cpu_ms(cost: CostModel, load: Load) -> float:
    """T_ca of one layer, with the way there and back."""
    return cost.cpu_attention_ms(load.cpu_requests, load.cpu_context_tokens) + cost.hand_off_ms(
        load.cpu_requests
    )


def iteration_ms(cost: CostModel, load: Load, other: Load | None = None, swapped_tokens: int = 0) -> float:
    """Predict an iteration.

    Args:
        load: sub-batch 0.
        other: sub-batch 1, if there is one.
        swapped_tokens: tokens whose KV crosses the bus, layer by layer, beside the computation.
    """
    cost = costs_of(cost, load, other, swapped_tokens)
    both = max if cost.overlaps else _sum
    if other is None:
        layer = cost.linear_ms(load.tokens) + both(device_attention_ms(cost, load), cpu_ms(cost, load))
        rows = load.rows
    else:
        stage_a = both(cost.linear_ms(load.tokens) + device_attention_ms(cost, other), cpu_ms(cost, other))
        stage_b = both(cost.linear_ms(other.tokens) + device_attention_ms(cost, load), cpu_ms(cost, load))
        layer = stage_a + stage_b
        rows = load.rows + other.rows
    if swapped_tokens:
        layer = both(layer, cost.transfer_ms(swapped_tokens))
    return cost.num_layers * layer + cost.head_ms(rows) + cost.iteration_ms


def _sum(first: float, second: float) -> float:
    return first + second
