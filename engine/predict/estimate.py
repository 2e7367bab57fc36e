"""How long an iteration takes, from what its sub-batches hold.

Per layer, with sub-batches 0 and 1 (NEO, section 3.2; `device_i` is T_pf + T_ga of sub-batch i):

    device   | linear 0, device 1 | linear 1, device 0 |
    host     | host attention 1   | host attention 0   |
               <----- stage A --->  <----- stage B --->

With one sub-batch its attention on the host runs beside its own attention on the device, and the linear
stages wait for both.

Rows for workers are sent ahead: those of one sub-batch are on their way while workers attend for the other.
So stages last for what workers attend, without the way there and back; but a layer takes no less than one
sub-batch needs for its linear stages, its way and its attention (Lamina, section 5.2), and no less than it
takes to send the rows of both:

    device   | linear 0 | linear 1 |           | linear 0 | ..
    link               | 0 |       | 1 |  | 0 |
    workers                | attention 0 | attention 1 | ..

Where a part of the weights lies in host memory, the host multiplies in the linear stages, too. It does all in
order: its attention for one sub-batch, and then its products for the other.

async decodes (`schedule.async_groups`) stand at all layers. Their rows join the linear stages of
sub-batch 0, and the host or a worker attends for those of layer l once it has attended for sub-batch 0:
nobody waits for that within the iteration, but what takes longer than it has time delays its other work. The
way to a worker and back takes none of its time; only the end of the iteration waits for the last layer's.

Decodes whose KV is swapped are the device's, and all their KV of a layer crosses the bus while it computes
the layers before; what is new of it leaves meanwhile, which may slow both. So do prompts' KV for host memory,
and moves: a layer takes as long as all of that, at least.
Copies read the host's memory, and so does the CPU's attention: where both together would take more than it
gives, a layer takes as long as it takes to read all of it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel


class Decodes(NamedTuple):
    """Decodes whose KV lies in one tier."""

    requests: int
    context_tokens: int  # theirs, summed


NO_DECODES: Mapping[KVTier, Decodes] = MappingProxyType({})


class BatchShape(NamedTuple):
    """What one sub-batch brings."""

    tokens: int = 0  # in linear stages
    rows: int = 0  # requests to be sampled
    prefill_ms: float = 0.0  # T_pf of all prompt chunks, one layer
    decodes: Mapping[KVTier, Decodes] = NO_DECODES  # tier -> those whose KV lies there
    fetched: int = 0  # tokens of prompts whose KV is swapped and comes to the device
    stored: int = 0  # and of those whose KV leaves it

    @property
    def num_decodes(self) -> int:
        """Decodes in all tiers."""
        requests = 0
        for decodes in self.decodes.values():
            requests += decodes.requests
        return requests

    def plus(self, more: Mapping[KVTier, Decodes]) -> "BatchShape":
        """Return this load with further decodes."""
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
    """Return the decodes of both."""
    if not some:
        return more
    both = dict(some)
    for tier, added in more.items():
        requests, context_tokens = both.get(tier, (0, 0))
        both[tier] = Decodes(requests + added.requests, context_tokens + added.context_tokens)
    return both


def device_attention_ms(cost: CostModel, shape: BatchShape) -> float:
    """T_pf + T_ga of one layer."""
    ms = shape.prefill_ms
    for tier, (requests, context_tokens) in shape.decodes.items():
        if not tier.host_attends:
            ms += cost.attention_ms(tier, requests, context_tokens)
    return ms


class OffDeviceTimes(NamedTuple):
    """What decodes that leave the device take in a layer, in ms."""

    all: float = 0.0  # from their rows to their output: `host_ms`
    cpu: float = 0.0  # of it, while the CPU can do nothing else
    away: float = 0.0  # likewise a worker: the one that is busy longest
    sending: float = 0.0  # likewise the network


NO_OFF_DEVICE_TIMES = OffDeviceTimes()


def off_device_times(cost: CostModel, decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
    """Return what decodes of a sub-batch take whoever attends, of all but the device.

    The CPU and workers attend beside each other.
    """
    cpu_ms = workers_ms = longest_ms = sending_ms = 0.0
    requests, of_cpu = 0, False
    for tier, (here, context_tokens) in decodes.items():
        if not tier.host_attends:
            continue
        requests += here
        here_ms = cost.attention_ms(tier, here, context_tokens)
        if not tier.is_remote:
            cpu_ms += here_ms
            of_cpu = True
        else:
            way = cost.network_ms(tier, here)
            workers_ms = max(workers_ms, here_ms)
            longest_ms = max(longest_ms, here_ms + way.all)
            sending_ms += way.sending  # all over the one network of this computer
    if not requests:
        return NO_OFF_DEVICE_TIMES
    offload_ms = cost.offload_ms(requests)
    return OffDeviceTimes(
        max(cpu_ms, longest_ms) + offload_ms,
        cpu_ms + offload_ms if of_cpu else 0.0,
        workers_ms,
        sending_ms,
    )


def host_ms(cost: CostModel, decodes: Mapping[KVTier, Decodes]) -> float:
    """T_ca of one layer, with the way there and back; of those that the host or workers attend for."""
    return off_device_times(cost, decodes).all


def streamed_tokens_of(shape: BatchShape) -> tuple[int, int]:
    """Return of how many tokens swapped KV comes to the device in each layer, and of how many it leaves."""
    fetched, stored = shape.fetched, shape.stored
    for tier, decodes in shape.decodes.items():
        if tier.is_streamed:
            fetched += decodes.context_tokens
            stored += decodes.requests
    return fetched, stored


def swap_both_ms(cost: CostModel, fetched: int, stored: int) -> float:
    """Return what copies of swapped KV take in a layer, both ways at once.

    Args:
        fetched: tokens whose KV comes to the device.
        stored: tokens whose KV leaves it.
    """
    shorter_ms, longer_ms = sorted((cost.swap_ms(fetched), cost.swap_ms(stored)))
    return longer_ms + (cost.duplex - 1.0) * shorter_ms


def copies_ms(cost: CostModel, shapes: Sequence[BatchShape], moved_tokens: int = 0) -> float:
    """Return what copies take in a layer.

    Args:
        moved_tokens: see `iteration_ms`.
    """
    fetched = stored = 0
    for shape in shapes:
        of_load = streamed_tokens_of(shape)
        fetched += of_load[0]
        stored += of_load[1]
    ms = cost.transfer_ms(moved_tokens) if moved_tokens else 0.0
    return ms + swap_both_ms(cost, fetched, stored) if fetched or stored else ms


class Times(NamedTuple):
    """What a layer of one sub-batch takes, in ms."""

    linear: float
    on_device: float  # attention there
    on_host: OffDeviceTimes
    host_linear: float = 0.0  # the host's part in the linear stages, which they wait for


def times_of(
    cost: CostModel, tokens: int, on_device_ms: float, on_host: OffDeviceTimes = NO_OFF_DEVICE_TIMES
) -> Times:
    """Return the times of a layer of a sub-batch of so many tokens, with attention that takes so long."""
    return Times(cost.linear_ms(tokens), on_device_ms, on_host, cost.host_linear_ms(tokens))


def times_ms(
    cost: CostModel,
    first: Times,
    second: Times | None,
    rows: int,
    copies_ms: float = 0.0,
    async_decodes: OffDeviceTimes = NO_OFF_DEVICE_TIMES,
) -> float:
    """Return what an iteration takes whose sub-batches take these times.

    Args:
        rows: to be sampled.
        copies_ms: what copies take beside each layer.
        async_decodes: what async decodes take in a layer; their rows are part of the linear stages
            of `first`.
    """
    both = max if cost.overlaps else _sum
    head_ms = cost.head_ms(rows)
    # Between the attention that sub-batch 0 waits for and that which sub-batch 1 waits for, in turn, the host
    # has as long as the device takes for the linear stages of the other. So has each worker.
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
        # No less than what one of them goes through, or all of them send.
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
    # The last layer's is done beside the head, or after it.
    end_ms = max(head_ms, async_decodes.all) if cost.overlaps else head_ms
    return cost.num_layers * layer + end_ms + cost.iteration_ms


def async_off_device(cost: CostModel, async_decodes: Mapping[KVTier, Decodes]) -> OffDeviceTimes:
    """Return what async decodes take in a layer, on average."""
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
    """Return those of async decodes that stand in a layer, and the share of layers with any."""
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
        loads: of sub-batch 0, and of sub-batch 1 if there is one.
        moved_tokens: tokens whose KV crosses the bus, layer by layer, beside the computation: prompts' for
            host memory, and moves. What is swapped is told by the loads.
        async_decodes: decodes that it takes one layer further.
    """
    return _iteration_ms(cost, shapes, async_decodes, copies_ms(cost, shapes, moved_tokens))


def copy_wait_ms(
    cost: CostModel,
    *shapes: BatchShape,
    moved_tokens: int = 0,
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> float:
    """Return how much of `iteration_ms` is waiting for KV that crosses the bus."""
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
    """Predict an iteration and its attention on the host; see `iteration_ms`."""
    total_ms = iteration_ms(cost, *shapes, moved_tokens=moved_tokens, async_decodes=async_decodes)
    return timing_of(cost, total_ms, shapes, async_decodes)


def timing_of(
    cost: CostModel,
    total_ms: float,
    shapes: Sequence[BatchShape],
    async_decodes: Mapping[KVTier, Decodes] = NO_DECODES,
) -> IterationTiming:
    """Return the prediction of an iteration that is known to take so long in all.

    Attention at workers is what is waited for: the network counts, and those at their own pace, for whom
    nobody waits, do not.
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
    """Return what decode attention takes the host and workers in an iteration."""
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
