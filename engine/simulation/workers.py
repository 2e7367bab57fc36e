"""Attention workers: other machines that attend for a GPU's decodes, and how many of them it wants.

The model is FastDecode's. A row (a decode in a layer) sends q, k and v over the GPU's link and gets the
output back; a worker then reads the KV of its requests. Requests are divided evenly, each one belongs to one
worker, so that more workers than requests bring nothing. Nothing of a row overlaps with itself: what hides
its way and its reading is the GPU's work for the other sub-batch. Rows of one sub-batch are on their way
while workers attend for the other.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil

import torch

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve, Network, Surface, TableCostModel
from neo_desktop.engine.predict.estimate import Decodes, host_ms
from neo_desktop.engine.simulation.analytic import LONGEST_CONTEXT, host_attention_ms
from neo_desktop.engine.simulation.divided import CPU_CALL_MS
from neo_desktop.engine.simulation.machine import HostPreset
from neo_desktop.models.config import ModelConfig

WORKERS = KVTier.worker(1)  # all of them together
MOST_ROWS = 1024  # per worker; the last point of the tables, beyond which they go on


@dataclass(frozen=True, slots=True)
class Link:
    """Between the GPU's machine and all workers together: theirs are taken to be as fast at least."""

    bytes_per_s: float  # one way
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class Workers:
    """Machines of one kind."""

    count: int
    kind: HostPreset  # its memory is what it gives to KV
    link: Link

    @property
    def title(self) -> str:
        """What they are called in a sentence: "4 workers at 51 GB/s"."""
        named = "1 worker" if self.count == 1 else f"{self.count:,} workers"
        return f"{named} at {self.kind.memory_bytes_per_s / 1e9:,.0f} GB/s"

    def kv_tokens(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return how many tokens of KV they hold together."""
        return self.count * (self.kind.memory_bytes // config.kv_bytes_per_token(dtype))


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """Chats that come as others end, so that so many are always being answered."""

    requests: int
    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Of a decode, on average."""
        return self.prompt_tokens + self.output_tokens / 2


def with_workers(
    cost: TableCostModel, workers: Workers, config: ModelConfig, dtype: torch.dtype
) -> TableCostModel:
    """Return the tables of the same GPU where workers attend in place of its own host."""
    link, count = workers.link, workers.count
    query_bytes = config.num_heads * config.head_dim * dtype.itemsize
    kv_bytes = config.kv_bytes_per_token(dtype) / config.num_layers  # of one layer, per token
    row_ms = (2 * query_bytes + kv_bytes) / link.bytes_per_s * 1e3
    sent_ms = (query_bytes + kv_bytes) / link.bytes_per_s * 1e3  # the output comes back beside others' rows
    token_ms = host_attention_ms(workers.kind, config, dtype)
    # The worker with the most requests has one at least: level up to as many requests as workers.
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
        # Prompts' KV goes on to the link while more of it comes over the bus.
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
    """Return the tables of workers that get rows after answering others: the way is their time."""
    attention, network = cost.attention[WORKERS], cost.networks[WORKERS]
    ms = [[each + network.all(n) for each in row] for n, row in zip(attention.x, attention.ms, strict=True)]
    return replace(
        cost, attention={**cost.attention, WORKERS: Surface(attention.x, attention.y, ms)}, networks={}
    )


def device_ms(cost: TableCostModel, load: SteadyLoad) -> float:
    """Return what the GPU computes in a layer for half of the decodes and the prompts that come with them."""
    rows = -(-load.requests // 2)
    prompts = rows * load.prompt_tokens / load.output_tokens  # tokens
    each = max(int(load.prompt_tokens), 1)
    prefill_ms = prompts * cost.prefill_attention_ms(each, 0) / each
    return cost.linear(rows + prompts) + prefill_ms


def workers_ms(cost: TableCostModel, load: SteadyLoad) -> float:
    """Return what attention for half of the decodes takes in a layer, with the way there and back."""
    rows = -(-load.requests // 2)
    return host_ms(cost, {WORKERS: Decodes(rows, round(rows * load.context_tokens))})


def workers_wanted(
    cost: TableCostModel,
    kind: HostPreset,
    link: Link,
    config: ModelConfig,
    dtype: torch.dtype,
    load: SteadyLoad,
) -> int | None:
    """Return how many workers of a kind hide their attention behind the GPU's work, and hold all KV.

    Two sub-batches take turns (FastDecode): while the GPU computes for one, the workers attend for the
    other. Fewer make the GPU wait, more of them wait themselves.

    Args:
        cost: of the GPU; what it says of attention is not used.

    Returns:
        None: no number is enough, since the link alone, or one request's attention, takes longer than the
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
