"""Iteration times, predicted from the shapes of the sub-batches.

Per layer, with sub-batches 0 and 1 (NEO, section 3.2; `device_i` is T_pf + T_ga of sub-batch i):

    device   | linear 0, device 1 | linear 1, device 0 |
    host     | host attention 1   | host attention 0   |
               <----- stage A --->  <----- stage B --->

A single sub-batch runs its host attention beside its own device attention; the linear stages wait for both.

Rows for workers are sent ahead: the rows of one sub-batch travel while the workers attend for the other.
A stage therefore lasts as long as the workers' attention, without the network. A layer has two lower bounds
(Lamina, section 5.2): the linear stages, network and attention of one sub-batch, and the sending of the rows
of both:

    device   | linear 0 | linear 1 |           | linear 0 | ..
    link               | 0 |       | 1 |  | 0 |
    workers                | attention 0 | attention 1 | ..

If some weights are in host memory, the host takes part in the linear stages. It works in order: the attention
of one sub-batch, then the matmuls of the other.

Async decodes (`schedule.async_groups`) are spread over all layers. Their rows join the linear stages of
sub-batch 0. The host or a worker attends for the decodes at layer l after its attention for sub-batch 0. This
is off the critical path; only the part that exceeds the idle time delays other work of the host or worker.
The network costs a worker no time; only the end of the iteration waits for the rows of the last layer.

Streamed decodes belong to the device. Their KV of a layer crosses the bus while the device computes earlier
layers. New KV leaves at the same time, which may slow both directions. The KV of prompts for host memory and
moved blocks also cross the bus. A layer takes at least as long as these copies.
Copies and the CPU's attention both read host memory. If together they exceed its bandwidth, a layer takes as
long as reading their data.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel


class Decodes(NamedTuple):
    """Number and context of the decodes in one KV tier."""

    requests: int
    context_tokens: int  # sum over the requests


NO_DECODES: Mapping[KVTier, Decodes] = MappingProxyType({})


class BatchShape(NamedTuple):
    """Work of one sub-batch."""

    tokens: int = 0  # tokens in linear stages
    rows: int = 0  # requests to sample
    prefill_ms: float = 0.0  # T_pf of the prompt chunks; one layer
    decodes: Mapping[KVTier, Decodes] = NO_DECODES  # by tier
    fetched: int = 0  # prompt tokens whose streamed KV is copied to the device
    stored: int = 0  # prompt tokens whose KV leaves the device for the streamed tier

    @property
    def num_decodes(self) -> int:
        requests = 0
        for decodes in self.decodes.values():
            requests += decodes.requests
        return requests

    def plus(self, more: Mapping[KVTier, Decodes]) -> "BatchShape":
        """Return this shape with further decodes."""
        if not more:
            return self
        requests = 0
        for decodes in more.values():
            requests += decodes.requests
        return BatchShape(
            self.tokens + requests,
            self.rows + requests,
            self.prefill_ms,
            joined(self.decodes, more),
            self.fetched,
            self.stored,
        )


def joined(some: Mapping[KVTier, Decodes], more: Mapping[KVTier, Decodes]) -> Mapping[KVTier, Decodes]:
    """Return the sum of both, by tier."""
    if not some:
        return more
    both = dict(some)
    for tier, added in more.items():
        requests, context_tokens = both.get(tier, (0, 0))
        both[tier] = Decodes(requests + added.requests, context_tokens + added.context_tokens)
    return both


def device_attention_ms(cost: CostModel, shape: BatchShape) -> float:
    """Return T_pf + T_ga of one layer."""
    ms = shape.prefill_ms
    for tier, (requests, context_tokens) in shape.decodes.items():
        if not tier.host_attends:
            ms += cost.attention_ms(tier, requests, context_tokens)
    return ms


class OffDeviceTimes(NamedTuple):
    """Times of one layer's decodes that leave the device, in ms."""

    all: float = 0.0  # from their rows to their output, see `host_ms`
    cpu: float = 0.0  # the CPU's share
    away: float = 0.0  # the busiest worker's share
    sending: float = 0.0  # the network's share


NO_OFF_DEVICE_TIMES = OffDeviceTimes()


def off_device_times(cost: CostModel, decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
    """Return the per-layer times of a sub-batch's off-device decodes; CPU and workers run in parallel."""
    cpu_ms = workers_ms = longest_ms = sending_ms = 0.0
    requests, uses_cpu = 0, False
    for tier, (here, context_tokens) in decodes.items():
        if not tier.host_attends:
            continue
        requests += here
        here_ms = cost.attention_ms(tier, here, context_tokens)
        if not tier.is_remote:
            cpu_ms += here_ms
            uses_cpu = True
        else:
            way = cost.network_ms(tier, here)
            workers_ms = max(workers_ms, here_ms)
            longest_ms = max(longest_ms, here_ms + way.all)
            sending_ms += way.sending  # all workers share this computer's network
    if not requests:
        return NO_OFF_DEVICE_TIMES
    offload_ms = cost.offload_ms(requests)
    return OffDeviceTimes(
        max(cpu_ms, longest_ms) + offload_ms,
        cpu_ms + offload_ms if uses_cpu else 0.0,
        workers_ms,
        sending_ms,
    )


def host_ms(cost: CostModel, decodes: Mapping[KVTier, Decodes]) -> float:
    """Return T_ca of one layer, including transfers, for decodes attended by the host or workers."""
    return off_device_times(cost, decodes).all


def streamed_tokens_of(shape: BatchShape) -> tuple[int, int]:
    """Return the tokens per layer whose KV streams to the device, and those whose KV leaves it."""
    fetched, stored = shape.fetched, shape.stored
    for tier, decodes in shape.decodes.items():
        if tier.is_streamed:
            fetched += decodes.context_tokens
            stored += decodes.requests
    return fetched, stored


def swap_both_ms(cost: CostModel, fetched: int, stored: int) -> float:
    """Return the time of one layer's copies of streamed KV in both directions at once.

    Args:
        fetched: tokens whose KV is copied to the device.
        stored: tokens whose KV is copied to host memory.
    """
    shorter_ms, longer_ms = sorted((cost.swap_ms(fetched), cost.swap_ms(stored)))
    return longer_ms + (cost.duplex - 1.0) * shorter_ms


def copies_ms(cost: CostModel, shapes: Sequence[BatchShape], moved_tokens: int = 0) -> float:
    """Return the time of one layer's copies.

    Args:
        moved_tokens: see `iteration_ms`.
    """
    fetched = stored = 0
    for shape in shapes:
        tokens = streamed_tokens_of(shape)
        fetched += tokens[0]
        stored += tokens[1]
    ms = cost.transfer_ms(moved_tokens) if moved_tokens else 0.0
    return ms + swap_both_ms(cost, fetched, stored) if fetched or stored else ms


class Times(NamedTuple):
    """Times of one layer of one sub-batch, in ms."""

    linear: float
    on_device: float  # attention on the device
    on_host: OffDeviceTimes
    host_linear: float = 0.0  # matmuls of offloaded weights on the host, which the linear stages wait for


def times_of(
    cost: CostModel, tokens: int, on_device_ms: float, on_host: OffDeviceTimes = NO_OFF_DEVICE_TIMES
) -> Times:
    """Return the times of a layer for a sub-batch of `tokens` tokens and the given attention times."""
    return Times(cost.linear_ms(tokens), on_device_ms, on_host, cost.host_linear_ms(tokens))


def times_ms(
    cost: CostModel,
    first: Times,
    second: Times | None,
    rows: int,
    copies_ms: float = 0.0,
    async_decodes: OffDeviceTimes = NO_OFF_DEVICE_TIMES,
) -> float:
    """Return the time of an iteration from the times of its sub-batches.

    Args:
        rows: requests to sample.
        copies_ms: copies beside each layer.
        async_decodes: times of the async decodes in a layer; the linear stages of `first` include their rows.
    """
    both = max if cost.overlaps else _sum
    head_ms = cost.head_ms(rows)
    # The host attends for one sub-batch while the device computes the linear stages of the other. So does
    # each worker.
    if second is None:
        layer = first.linear + both(first.on_device, first.on_host.all)
        if cost.overlaps:
            layer = max(layer, first.on_host.cpu + first.host_linear + async_decodes.cpu)
            layer = max(layer, first.on_host.away + async_decodes.away)
            layer = max(layer, first.on_host.sending + async_decodes.sending)
        else:
            layer += async_decodes.all
    elif cost.overlaps:
        stage_a, stage_b = first.linear + second.on_device, second.linear + first.on_device
        stages = stage_a, stage_b
        for in_a, in_b, own in (
            (
                second.on_host.cpu + first.host_linear,
                first.on_host.cpu + second.host_linear,
                async_decodes.cpu,
            ),
            (second.on_host.away, first.on_host.away, async_decodes.away),
        ):
            late_ms = max(own - max(stage_b - in_b, 0.0), 0.0)
            stages = max(stages[0], in_a + late_ms), max(stages[1], in_b)
        # Lower bounds: the path of one sub-batch, and the network time of both.
        layer = max(sum(stages), first.linear + first.on_host.all, second.linear + second.on_host.all)
        layer = max(layer, first.on_host.sending + second.on_host.sending + async_decodes.sending)
    else:
        layer = sum(
            each.linear + each.on_device + each.on_host.all + each.host_linear for each in (first, second)
        )
        layer += async_decodes.all
    if copies_ms:
        layer = both(layer, copies_ms)
        if cost.overlaps:
            shares = cost.memory_shares
            cpu_ms = first.on_host.cpu + first.host_linear + async_decodes.cpu
            cpu_ms += second.on_host.cpu + second.host_linear if second else 0.0
            layer = max(layer, copies_ms * shares.copies + cpu_ms * shares.attention)
    attending = [first.on_host, async_decodes] + ([] if second is None else [second.on_host])
    layer += cost.overlap_loss * sum(each.cpu + each.away for each in attending)
    # The async decodes of the last layer finish beside the head, or after it.
    end_ms = max(head_ms, async_decodes.all) if cost.overlaps else head_ms
    return cost.num_layers * layer + end_ms + cost.iteration_ms


def async_off_device(cost: CostModel, async_decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
    """Return the mean times of the async decodes in a layer."""
    all_ms = cpu_ms = away_ms = sending_ms = 0.0
    for tier, decodes in async_decodes.items():
        each, share = _in_a_layer(cost, decodes)
        attention_ms = cost.attention_ms(tier, *each)
        offload_ms = cost.offload_ms(each.requests)
        if not tier.is_remote:
            cpu_ms += (attention_ms + offload_ms) * share
            continue
        way = cost.network_ms(tier, each.requests)
        away_ms = max(away_ms, attention_ms * share)
        sending_ms += way.sending * share
        all_ms = max(all_ms, (attention_ms + offload_ms + way.all) * share)
    return OffDeviceTimes(max(all_ms, cpu_ms), cpu_ms, away_ms, sending_ms)


def _in_a_layer(cost: CostModel, decodes: Decodes) -> tuple[Decodes, float]:
    """Return the async decodes at an occupied layer, and the share of layers that are occupied."""
    requests, context_tokens = decodes
    each = -(-requests // min(requests, cost.num_layers))
    return Decodes(each, each * context_tokens // requests), requests / (each * cost.num_layers)


def async_rows(cost: CostModel, async_decodes: Mapping[KVTier, Decodes]) -> int:
    """Return how many rows of async decodes join each linear stage."""
    return -(-sum(requests for requests, _ in async_decodes.values()) // cost.num_layers)


def iteration_ms(
    cost: CostModel,
    *shapes: BatchShape,
    moved_tokens: int = 0,
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> float:
    """Predict an iteration.

    Args:
        shapes: of sub-batch 0, and of sub-batch 1 if it exists.
        moved_tokens: tokens whose KV crosses the bus layer by layer, beside the computation: moves, and
            prompts for host memory. The shapes contain streamed KV.
        async_decodes: decodes that advance by one layer.
    """
    return _iteration_ms(cost, shapes, async_decodes, copies_ms(cost, shapes, moved_tokens))


def copy_wait_ms(
    cost: CostModel,
    *shapes: BatchShape,
    moved_tokens: int = 0,
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> float:
    """Return the part of `iteration_ms` spent waiting for KV copies."""
    all_ms = iteration_ms(cost, *shapes, moved_tokens=moved_tokens, async_decodes=async_decodes)
    return all_ms - _iteration_ms(cost, shapes, async_decodes, 0.0)


def _iteration_ms(
    cost: CostModel, shapes: Sequence[BatchShape], async_decodes: Mapping[KVTier, Decodes], copies_ms: float
) -> float:
    more_rows = async_rows(cost, async_decodes)
    tokens = [shape.tokens for shape in shapes]
    tokens[0] += more_rows
    times = [
        times_of(cost, count, device_attention_ms(cost, shape), off_device_times(cost, shape.decodes))
        for count, shape in zip(tokens, shapes, strict=True)
    ]
    rows = sum(shape.rows for shape in shapes) + more_rows
    second = times[1] if len(times) > 1 else None
    return times_ms(cost, times[0], second, rows, copies_ms, async_off_device(cost, async_decodes))


def predict(
    cost: CostModel,
    *shapes: BatchShape,
    moved_tokens: int = 0,
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> IterationTiming:
    """Predict an iteration and its host attention; see `iteration_ms`."""
    total_ms = iteration_ms(cost, *shapes, moved_tokens=moved_tokens, async_decodes=async_decodes)
    return timing_of(cost, total_ms, shapes, async_decodes)


def timing_of(
    cost: CostModel,
    total_ms: float,
    shapes: Sequence[BatchShape],
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> IterationTiming:
    """Return the timing of an iteration whose total time is known.

    The attention of workers counts with the network, because the iteration waits for both. It does not wait
    for async decodes of workers, which therefore do not count.
    """
    waited_for = {tier: decodes for tier, decodes in async_decodes.items() if tier.cpu_attends}
    attention_ms = attending_ms(cost, shapes, waited_for)
    for shape in shapes:
        for tier, (requests, _) in shape.decodes.items():
            if tier.is_remote:
                attention_ms += cost.num_layers * cost.network_ms(tier, requests).all
    copied_tokens = sum(streamed_tokens_of(shape)[0] for shape in shapes)
    if not copied_tokens:
        return IterationTiming(total_ms, attention_ms)
    return IterationTiming(
        total_ms,
        attention_ms,
        copies_ms=cost.swap_ms(copied_tokens) * cost.num_layers,
        copy_wait_ms=max(total_ms - _iteration_ms(cost, shapes, async_decodes, 0.0), 0.0),
        copied_tokens=copied_tokens,
    )


def attending_ms(
    cost: CostModel, shapes: Sequence[BatchShape], async_decodes: Mapping[KVTier, Decodes]
) -> float:
    """Return the time of the decode attention on the host and workers in an iteration."""
    ms = 0.0
    for tier, decodes in async_decodes.items():
        each, share = _in_a_layer(cost, decodes)
        ms += cost.attention_ms(tier, *each) * share
    for shape in shapes:
        for tier, (requests, context_tokens) in shape.decodes.items():
            if tier.host_attends:
                ms += cost.attention_ms(tier, requests, context_tokens)
    return ms * cost.num_layers


def _sum(first: float, second: float) -> float:
    return first + second
