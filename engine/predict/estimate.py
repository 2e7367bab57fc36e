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
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from neo_desktop.engine.batch import Contents, IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel


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


class IterationShape(NamedTuple):
    """Work of one iteration."""

    batches: tuple[BatchShape, ...]  # sub-batch 0, and sub-batch 1 if it exists
    # Tokens whose KV crosses the bus layer by layer, beside the computation: moves, and prompts for host
    # memory. The sub-batches contain streamed KV.
    moved_tokens: int = 0
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES  # decodes that advance by one layer


def joined(some: Mapping[KVTier, Decodes], more: Mapping[KVTier, Decodes]) -> Mapping[KVTier, Decodes]:
    """Return the sum of both, by tier."""
    if not some:
        return more
    both = dict(some)
    for tier, added in more.items():
        requests, context_tokens = both.get(tier, (0, 0))
        both[tier] = Decodes(requests + added.requests, context_tokens + added.context_tokens)
    return both


def device_attention_ms(cost: TableCostModel, shape: BatchShape) -> float:
    """Return T_pf + T_ga of one layer."""
    ms = shape.prefill_ms
    for tier, (requests, context_tokens) in shape.decodes.items():
        if not tier.host_attends:
            ms += cost.attention_ms(tier, requests, context_tokens)
    return ms


class OffDeviceTimes(NamedTuple):
    """Times of one layer's decodes that leave the device, in ms."""

    all: float = 0.0  # T_ca: from their rows to their output, including transfers
    cpu: float = 0.0  # the CPU's share
    away: float = 0.0  # the busiest worker's share
    sending: float = 0.0  # the network's share


NO_OFF_DEVICE_TIMES = OffDeviceTimes()


def off_device_times(cost: TableCostModel, decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
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


def streamed_tokens_of(shape: BatchShape) -> tuple[int, int]:
    """Return the tokens per layer whose KV streams to the device, and those whose KV leaves it."""
    fetched, stored = shape.fetched, shape.stored
    for tier, decodes in shape.decodes.items():
        if tier.is_streamed:
            fetched += decodes.context_tokens
            stored += decodes.requests
    return fetched, stored


def swap_both_ms(cost: TableCostModel, fetched: int, stored: int) -> float:
    """Return the time of one layer's copies of streamed KV in both directions at once.

    Args:
        fetched: tokens whose KV is copied to the device.
        stored: tokens whose KV is copied to host memory.
    """
    shorter_ms, longer_ms = sorted((cost.swap_ms(fetched), cost.swap_ms(stored)))
    return longer_ms + (cost.duplex - 1.0) * shorter_ms


def copies_ms(cost: TableCostModel, batches: Sequence[BatchShape], moved_tokens: int = 0) -> float:
    """Return the time of one layer's copies.

    Args:
        moved_tokens: see `IterationShape`.
    """
    fetched = stored = 0
    for shape in batches:
        tokens = streamed_tokens_of(shape)
        fetched += tokens[0]
        stored += tokens[1]
    ms = cost.transfer_ms(moved_tokens) if moved_tokens else 0.0
    return ms + swap_both_ms(cost, fetched, stored) if fetched or stored else ms


class _Times(NamedTuple):
    """Times of one layer of one sub-batch, in ms."""

    linear: float
    on_device: float  # attention on the device
    off_device: OffDeviceTimes
    host_linear: float  # matmuls of offloaded weights on the host, which the linear stages wait for


def iteration_ms(cost: TableCostModel, shape: IterationShape) -> float:
    """Predict the time of an iteration."""
    return _iteration(cost, shape, copies_ms(cost, shape.batches, shape.moved_tokens))[0]


def copy_wait_ms(cost: TableCostModel, shape: IterationShape) -> float:
    """Return the part of `iteration_ms` spent waiting for KV copies."""
    ms = copies_ms(cost, shape.batches, shape.moved_tokens)
    return _iteration(cost, shape, ms)[0] - _iteration(cost, shape, 0.0)[0] if ms else 0.0


def _iteration(cost: TableCostModel, shape: IterationShape, copies_ms: float) -> tuple[float, Contents]:
    """Predict the time and contents of an iteration with the given time of copies beside each layer."""
    async_decodes = async_off_device(cost, shape.async_decodes)
    # Rows of async decodes join each linear stage.
    more_rows = rows = -(-sum(each.requests for each in shape.async_decodes.values()) // cost.num_layers)
    times = []
    for batch in shape.batches:
        tokens = batch.tokens + more_rows
        rows += batch.rows
        more_rows = 0
        times.append(
            _Times(
                cost.linear_ms(tokens),
                device_attention_ms(cost, batch),
                off_device_times(cost, batch.decodes),
                cost.host_linear_ms(tokens),
            )
        )
    first, second = times[0], times[1] if len(times) > 1 else None
    if not cost.overlaps:
        layer = sum(each.linear + each.on_device + each.off_device.all for each in times)
        layer += async_decodes.all + copies_ms
    # The host attends for one sub-batch while the device computes the linear stages of the other. So does
    # each worker.
    elif second is None:
        layer = max(
            first.linear + max(first.on_device, first.off_device.all),
            first.off_device.cpu + first.host_linear + async_decodes.cpu,
            first.off_device.away + async_decodes.away,
            first.off_device.sending + async_decodes.sending,
        )
    else:
        stage_a, stage_b = first.linear + second.on_device, second.linear + first.on_device
        stages = stage_a, stage_b
        for in_a, in_b, own in (
            (
                second.off_device.cpu + first.host_linear,
                first.off_device.cpu + second.host_linear,
                async_decodes.cpu,
            ),
            (second.off_device.away, first.off_device.away, async_decodes.away),
        ):
            late_ms = max(own - max(stage_b - in_b, 0.0), 0.0)
            stages = max(stages[0], in_a + late_ms), max(stages[1], in_b)
        # Lower bounds: the path of one sub-batch, and the network time of both.
        layer = max(
            sum(stages),
            first.linear + first.off_device.all,
            second.linear + second.off_device.all,
            first.off_device.sending + second.off_device.sending + async_decodes.sending,
        )
    if copies_ms and cost.overlaps:
        shares = cost.memory_shares
        cpu_ms = first.off_device.cpu + first.host_linear + async_decodes.cpu
        cpu_ms += second.off_device.cpu + second.host_linear if second else 0.0
        layer = max(layer, copies_ms, copies_ms * shares.copies + cpu_ms * shares.attention)
    # The async decodes of the last layer finish beside the head, or after it.
    head_ms = cost.head_ms(rows)
    end_ms = max(head_ms, async_decodes.all) if cost.overlaps else head_ms
    off_device = [*(each.off_device for each in times), async_decodes]
    contents = _contents(cost, shape, off_device)
    return cost.num_layers * layer + end_ms + cost.outside_ms + cost.excess_ms(contents), contents


def _contents(cost: TableCostModel, shape: IterationShape, off_device: Sequence[OffDeviceTimes]) -> Contents:
    """Return the parts of an iteration that `Correction.excess` corrects.

    Args:
        off_device: times of the sub-batches' decodes, then of the async decodes.
    """
    layers_ms = cost.num_layers * cost.linear(1)
    tiers = [tier for batch in shape.batches for tier in batch.decodes]
    prompts = any(batch.tokens > batch.num_decodes for batch in shape.batches)
    streamed = any(tier.is_streamed for tier in tiers)
    streamed = streamed or any(batch.fetched or batch.stored for batch in shape.batches)
    moves = bool(shape.moved_tokens)
    host = bool(shape.async_decodes) or any(tier.host_attends for tier in tiers)
    return Contents(
        layers_ms * (prompts or moves or streamed),
        layers_ms * prompts,
        layers_ms * moves,
        layers_ms * streamed,
        layers_ms * host,
        cost.num_layers * sum(each.cpu + each.away for each in off_device),
    )


def async_off_device(cost: TableCostModel, async_decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
    """Return the mean times of the async decodes in a layer."""
    if not async_decodes:
        return NO_OFF_DEVICE_TIMES
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


def _in_a_layer(cost: TableCostModel, decodes: Decodes) -> tuple[Decodes, float]:
    """Return the async decodes at an occupied layer, and the share of layers that are occupied."""
    requests, context_tokens = decodes
    each = -(-requests // min(requests, cost.num_layers))
    return Decodes(each, each * context_tokens // requests), requests / (each * cost.num_layers)


def predict(cost: TableCostModel, shape: IterationShape) -> IterationTiming:
    """Predict an iteration, its host attention and its copies of streamed KV.

    The attention of workers counts with the network, because the iteration waits for both. It does not wait
    for async decodes of workers, which therefore do not count.
    """
    total_ms, contents = _iteration(cost, shape, copies_ms(cost, shape.batches, shape.moved_tokens))
    waited_for = {tier: decodes for tier, decodes in shape.async_decodes.items() if tier.cpu_attends}
    attention_ms = attending_ms(cost, shape._replace(async_decodes=waited_for))
    for batch in shape.batches:
        for tier, (requests, _) in batch.decodes.items():
            if tier.is_remote:
                attention_ms += cost.num_layers * cost.network_ms(tier, requests).all
    copied_tokens = sum(streamed_tokens_of(batch)[0] for batch in shape.batches)
    timing = IterationTiming(total_ms, attention_ms, contents=contents, excess_ms=cost.excess_ms(contents))
    if not copied_tokens:
        return timing
    return replace(
        timing,
        copies_ms=cost.swap_ms(copied_tokens) * cost.num_layers,
        copy_wait_ms=max(total_ms - _iteration(cost, shape, 0.0)[0], 0.0),
        copied_tokens=copied_tokens,
    )


def attending_ms(cost: TableCostModel, shape: IterationShape) -> float:
    """Return the time of the decode attention on the host and workers in an iteration."""
    ms = 0.0
    for tier, decodes in shape.async_decodes.items():
        each, share = _in_a_layer(cost, decodes)
        ms += cost.attention_ms(tier, *each) * share
    for batch in shape.batches:
        for tier, (requests, context_tokens) in batch.decodes.items():
            if tier.host_attends:
                ms += cost.attention_ms(tier, requests, context_tokens)
    return ms * cost.num_layers


def prompt_ms(cost: TableCostModel, begin: int, end: int, max_batch_tokens: int) -> float:
    """Return the time to compute the tokens `begin .. end - 1` of a prompt in chunks, alone."""
    chunks = [(start, min(max_batch_tokens, end - start)) for start in range(begin, end, max_batch_tokens)]
    return sum(
        cost.outside_ms + cost.num_layers * (cost.linear_ms(n) + cost.prefill_attention_ms(n, start))
        for start, n in chunks
    )
