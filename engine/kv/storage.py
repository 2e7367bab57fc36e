"""The memory behind the KV cache: a pool of blocks per tier. Knows blocks, not whose they are."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import KVLayer, Rows, slots_of
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig


def layer_kind(device: torch.device) -> type[KVLayer]:
    """Return how KV lies in a device's memory."""
    if device.type == "cpu":
        return HostLayer
    return DeviceLayer


def memory_of(tier: KVTier, device: torch.device) -> torch.device:
    """Return in whose memory a tier lies, for a model that runs on `device`."""
    return torch.device("cpu") if tier.in_host_memory else device


class KVPool:
    """K and V of all blocks of one tier.

    Args:
        config: the model's.
        num_blocks: in each layer.
        block_size: tokens per block.
        dtype: of K and V; int8 is for host memory only.
        device: whose memory it is.
        kind: how it is used; None: as fits the device.
        sinks: those of each layer `[heads]`, of a model that has some; see `KVLayer.decode`.
        memory_of_layers: of each layer which part of the memory it has; None: one of its own.

    Raises:
        ValueError: int8 was asked for where it cannot be.
    """

    worker: str | None = None  # whose memory it is; None: this computer's

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: type[KVLayer] | None = None,
        sinks: Sequence[Tensor] | None = None,
        memory_of_layers: Sequence[int] | None = None,
    ) -> None:
        assert (sinks is not None) == config.attention_sinks
        self.kind = kind or layer_kind(device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        memory_of_layers = memory_of_layers or range(config.num_layers)
        in_memory = replace(config, num_layers=max(memory_of_layers) + 1)
        self.parts = self.kind.allocate(in_memory, num_blocks, block_size, dtype, device)
        self.row_shape = config.num_kv_heads, config.head_dim
        self._layers = [
            self.kind(
                tuple(part[memory] for part in self.parts),
                block_size,
                None if sinks is None else sinks[index].to(device, torch.float32),
                config.attention_softcap,
            )
            for index, memory in enumerate(memory_of_layers)
        ]

    def layer(self, index: int) -> KVLayer:
        """Return one layer."""
        return self._layers[index]

    @property
    def fused_kv_append(self) -> bool:
        """Whether rows are stored with the rotation, and not by attention."""
        return self.kind.fused_kv_append

    def rows_at(self, slots: Tensor) -> "PoolRows":
        """Return the rows at some slots, [n] int64 in host memory, all different."""
        return PoolRows(self, slots)

    @property
    def block_bytes(self) -> int:
        """What a block takes of host memory that can be given back; 0: none of it can."""
        if self.device.type != "cpu" or not issubclass(self.kind, HostLayer):
            return 0
        return sum(part.nbytes for part in self.parts) // max(self.num_blocks, 1)

    def give_back(self, num_blocks: int) -> int:
        """Give the memory behind the first blocks, whole runs, back to the system; return how many bytes.

        Raises:
            OSError: the system refuses.
        """
        return self.kind.give_back(self.parts, num_blocks)

    def with_layers(self, indices: Iterable[int]) -> "KVPool":
        """Return a pool that has these layers in their order, in the same memory; `parts` stay all of it."""
        pool = copy.copy(self)
        pool._layers = [self._layers[index] for index in indices]
        return pool


class PoolRows:
    """Rows of a pool at some slots, as the model's device reads and writes them: all of it is work for it.

    Args:
        pool: whose.
        slots: [n] int64 in host memory, all different.
    """

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool = pool
        self._slots = upload(slots, torch.int64, pool.device)

    def read(self, layer: int, out: Rows) -> None:
        """Copy them to memory of the pool's device."""
        self._pool.layer(layer).read(self._slots, out)

    def write(self, layer: int, rows: Rows) -> None:
        """Copy rows there."""
        self._pool.layer(layer).write(rows[0], rows[1], self._slots)


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies from one tier to another that can be carried out in any order."""

    source: KVPool
    source_slots: Tensor  # [n] int64 in host memory; target_slots likewise
    target: KVPool
    target_slots: Tensor
    from_pages: bool  # whether the CPU has to read the source, in pages of host memory
    to_pages: bool  # whether it has to write to the target


class KVStorage:
    """`tier -> KVPool`."""

    def __init__(self, pools: Mapping[KVTier, KVPool]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, tier: KVTier) -> KVPool:
        return self._pools[tier]

    @property
    def tiers(self) -> tuple[KVTier, ...]:
        """Those with a pool."""
        return tuple(self._pools)

    @property
    def block_size(self) -> int:
        """Tokens per block, in all tiers."""
        return next(iter(self._pools.values())).block_size

    def get(self, tier: KVTier) -> KVPool | None:
        """Return the pool of a tier; None if the policy does not use it."""
        return self._pools.get(tier)

    def copy_groups(self, copies: Sequence[BlockCopy]) -> list[CopyGroup]:
        """Cut copies that must be carried out in their order into groups to be carried out in theirs.

        All copies of a group go the same way, and no two of them write the same block.
        """
        groups: list[list[BlockCopy]] = []
        written: set[int] = set()
        way: tuple[KVTier, KVTier] | None = None
        for each in copies:
            if way != (each.source, each.target) or each.target_block in written:
                way = each.source, each.target
                groups.append([])
                written.clear()
            groups[-1].append(each)
            written.add(each.target_block)
        return [self._group(group) for group in groups]

    def _group(self, copies: Sequence[BlockCopy]) -> CopyGroup:
        source, target = self._pools[copies[0].source], self._pools[copies[0].target]
        old = torch.tensor([each.source_block for each in copies])
        new = torch.tensor([each.target_block for each in copies])
        return CopyGroup(
            source,
            slots_of(old, source.block_size),
            target,
            slots_of(new, target.block_size),
            from_pages=copies[0].source.host_attends,
            to_pages=copies[0].target.host_attends,
        )
