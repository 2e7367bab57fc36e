"""Attention workers: other machines that attend for a GPU's decodes, and the number that the GPU needs.

The model is FastDecode's. A row (a decode in a layer) sends q, k and v over the GPU's link and receives the
output; a worker reads the KV of its requests in between. Requests are divided evenly, and each belongs to one
worker, so more workers than requests gain nothing. A row does not overlap with itself: the GPU's work for the
other sub-batch hides its network and reading times. Rows of one sub-batch are in transit while workers attend
for the other.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil

import torch

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve, Network, Surface, TableCostModel
from neo_desktop.engine.predict.estimate import Decodes, off_device_times
from neo_desktop.engine.simulation.analytic import LONGEST_CONTEXT, host_attention_ms
from neo_desktop.engine.simulation.divided import CPU_CALL_MS
from neo_desktop.engine.simulation.machine import HostPreset
from neo_desktop.models.config import ModelConfig

WORKERS = KVTier.worker(1)  # all together
MOST_ROWS = 1024  # per worker; the last point of the tables, which extrapolate beyond


@dataclass(frozen=True, slots=True)
class Link:
    """Link between the GPU's machine and all workers; the workers' own links are at least as fast."""

    bytes_per_s: float  # one way
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class Workers:
    """Machines of one kind."""

    count: int
    kind: HostPreset  # its memory is the memory for KV
    link: Link

    @property
    def title(self) -> str:
        """Their name in a sentence: "4 workers at 51 GB/s"."""
        named = "1 worker" if self.count == 1 else f"{self.count:,} workers"
        return f"{named} at {self.kind.memory_bytes_per_s / 1e9:,.0f} GB/s"

    def kv_tokens(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the KV tokens that the workers hold together."""
        return self.count * (self.kind.memory_bytes // config.kv_bytes_per_token(dtype))


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """A constant number of chats: a new chat starts whenever another ends."""

    requests: int
    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Mean context of a decode."""
        return self.prompt_tokens + self.output_tokens / 2


def with_workers(
    cost: TableCostModel, workers: Workers, config: ModelConfig, dtype: torch.dtype
) -> TableCostModel:
    """Return tables of the same GPU, with workers' attention in place of the host's."""
    link, count = workers.link, workers.count
    query_bytes = config.num_heads * config.head_dim * dtype.itemsize
    kv_bytes = config.kv_bytes_per_token(dtype) / config.num_layers  # of one layer, per token
    row_ms = (2 * query_bytes + kv_bytes) / link.bytes_per_s * 1e3
    sent_ms = (query_bytes + kv_bytes) / link.bytes_per_s * 1e3  # the output returns beside other rows
    token_ms = host_attention_ms(workers.kind, config, dtype)
    # The busiest worker has at least one request: constant up to as many requests as workers.
    requests = sorted({1, count, count * MOST_ROWS})
    contexts = (1, LONGEST_CONTEXT)
    attention = Surface(
        requests,
        contexts,
        [[CPU_CALL_MS + max(n / count, 1) * c * token_ms for c in contexts] for n in requests],
    )
    rows = cost.offload.x
    network = Network(
        Curve(rows, [link.round_trip_ms + n * row_ms for n in rows]),
        Curve(rows, [n * sent_ms for n in rows]),
    )
    tokens = cost.transfer.x
    return replace(
        cost,
        # The KV of prompts continues on the link while more KV crosses the bus.
        transfer=Curve(
            tokens, [max(cost.transfer(n), n * kv_bytes / link.bytes_per_s * 1e3) for n in tokens]
        ),
        attention={
            tier: attention if tier.host_attends else surface for tier, surface in cost.attention.items()
        }
        | {WORKERS: attention},
        networks={WORKERS: network},
    )


def in_turn(cost: TableCostModel) -> TableCostModel:
    """Return tables for workers that receive rows only after answering others: network time is busy time."""
    attention, network = cost.attention[WORKERS], cost.networks[WORKERS]
    ms = [[each + network.all(n) for each in row] for n, row in zip(attention.x, attention.ms, strict=True)]
    return replace(
        cost, attention={**cost.attention, WORKERS: Surface(attention.x, attention.y, ms)}, networks={}
    )


def device_ms(cost: TableCostModel, load: SteadyLoad) -> float:
    """Return the GPU's time in a layer for half of the decodes and the prompts that accompany them."""
    rows = -(-load.requests // 2)
    prompts = rows * load.prompt_tokens / load.output_tokens  # tokens
    each = max(int(load.prompt_tokens), 1)
    prefill_ms = prompts * cost.prefill_attention_ms(each, 0) / each
    return cost.linear(rows + prompts) + prefill_ms


def workers_ms(cost: TableCostModel, load: SteadyLoad) -> float:
    """Return the time of attention for half of the decodes in a layer, including the network."""
    rows = -(-load.requests // 2)
    return off_device_times(cost, {WORKERS: Decodes(rows, round(rows * load.context_tokens))}).all


def workers_wanted(
    cost: TableCostModel,
    kind: HostPreset,
    link: Link,
    config: ModelConfig,
    dtype: torch.dtype,
    load: SteadyLoad,
) -> int | None:
    """Return the number of workers that hide their attention behind the GPU's work, and hold all KV.

    Two sub-batches alternate (FastDecode): while the GPU computes one, the workers attend for the other. With
    fewer workers the GPU waits; with more, the workers wait.

    Args:
        cost: of the GPU; its attention times are not used.

    Returns:
        None: no number suffices, because the link alone, or one request's attention, takes longer than the
        GPU's work.
    """
    busy_ms = device_ms(cost, load)

    def hides(count: int) -> bool:
        return workers_ms(with_workers(cost, Workers(count, kind, link), config, dtype), load) <= busy_ms

    counts = range(1, max(load.requests // 2, 1) + 1)
    enough = bisect_left(counts, True, key=hides)
    if enough == len(counts):
        return None
    held = Workers(1, kind, link).kv_tokens(config, dtype)
    all_tokens = load.requests * (load.prompt_tokens + load.output_tokens)
    return max(counts[enough], ceil(all_tokens / max(held, 1)))
