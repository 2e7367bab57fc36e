"""The memory behind the KV cache: a pool of blocks per tier, without knowledge of their owners."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import KVLayer, Rows, rows_shape, slots_of
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.attention import specs_of
from neo_desktop.models.config import ModelConfig
from neo_desktop.native.relay import HostCaches


def layer_kind(device: torch.device) -> type[KVLayer]:
    """Return the KV layout for a device's memory."""
    return HostLayer if device.type == "cpu" else DeviceLayer


def memory_of(tier: KVTier, device: torch.device) -> torch.device:
    """Return the device whose memory holds a tier, for a model on `device`."""
    return torch.device("cpu") if tier.in_host_memory else device


class KVPool:
    """K and V of every block of one tier.

    Args:
        dtype: Type of K and V; int8 is for host memory only.
        kind: Memory layout; None: the device's default.
        sinks: Per layer, [heads]; see `KVLayer.decode`.
        memory_of_layers: Index of the memory per layer, which layers may share; None: one per layer.
    """

    worker: str | None = None  # name of the attention worker; None: memory of this computer

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
        self.config = config
        specs = specs_of(config, sinks and [each.to(device, torch.float32) for each in sinks])
        self._layers = [
            self.kind(tuple(part[memory] for part in self.parts), block_size, spec)
            for spec, memory in zip(specs, memory_of_layers, strict=True)
        ]

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

    @cached_property
    def host_caches(self) -> HostCaches:
        """The layers of a pool in host memory in the form of native tasks."""
        layers = [layer for layer in self._layers if isinstance(layer, HostLayer)]
        assert len(layers) == self.num_layers
        spec, caches = layers[0].spec, [layer.cache for layer in layers]
        return HostCaches(caches, block_size=self.block_size, scale=spec.scale, softcap=spec.softcap or 0.0)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def rows_shape(self, count: int) -> tuple[int, int, int, int]:
        """Return the shape of `Rows` of `count` tokens."""
        return rows_shape(self.config, count)

    @property
    def fused_kv_append(self) -> bool:
        """True if the rotation kernel stores rows, False if attention does."""
        return self.kind.fused_kv_append

    def rows_at(self, slots: Tensor) -> "PoolRows":
        """Return a view of the rows at slots, [n] int64 in host memory, all different."""
        return PoolRows(self, slots)

    @property
    def block_bytes(self) -> int:
        """Bytes of host memory per block that can be given back to the system."""
        if self.device.type != "cpu" or not issubclass(self.kind, HostLayer):
            return 0
        return sum(part.nbytes for part in self.parts) // max(self.num_blocks, 1)

    def give_back(self, num_blocks: int) -> int:
        """Return the memory after the first blocks (whole runs) to the system; return the number of bytes.

        Raises:
            OSError: The system refuses.
        """
        return self.kind.give_back(self.parts, num_blocks)

    def with_layers(self, indices: Iterable[int]) -> "KVPool":
        """Return a pool over the same memory with these layers, in this order; `parts` stay complete."""
        pool = copy.copy(self)
        pool._layers = [self._layers[index] for index in indices]
        vars(pool).pop("host_caches", None)  # it has other layers
        return pool


class PoolRows:
    """Rows of a pool at given slots; the model's device reads and writes them."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool = pool
        self._slots = upload(slots, torch.int64, pool.device)

    def read(self, layer: int, out: Rows) -> None:
        self._pool.layer(layer).read(self._slots, out)

    def write(self, layer: int, rows: Rows) -> None:
        self._pool.layer(layer).write(rows[0], rows[-1], self._slots)


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies from one tier to another, valid in any order."""

    source: KVPool
    source_slots: Tensor  # [n] int64 in host memory
    target: KVPool
    target_slots: Tensor  # [n] int64 in host memory
    from_pages: bool  # the CPU has to read the source from pages in host memory
    to_pages: bool  # the CPU has to write the target to pages in host memory


class KVStorage:
    """`tier -> KVPool`, and the states of recurrent layers.

    Args:
        states: per recurrent operator, [slots + 1, ...] float32; empty: the model has none.
    """

    def __init__(self, pools: Mapping[KVTier, KVPool], states: Sequence[Tensor] = ()) -> None:
        self._pools = dict(pools)
        self.states = tuple(states)

    def __getitem__(self, tier: KVTier) -> KVPool:
        return self._pools[tier]

    @property
    def tiers(self) -> tuple[KVTier, ...]:
        return tuple(self._pools)

    @property
    def block_size(self) -> int:
        return next(iter(self._pools.values())).block_size

    @property
    def num_states(self) -> int | None:
        """Slots for states of recurrent layers; None: the model has none."""
        return len(self.states[0]) - 1 if self.states else None

    def get(self, tier: KVTier) -> KVPool | None:
        return self._pools.get(tier)

    def copy_groups(self, copies: Sequence[BlockCopy]) -> list[CopyGroup]:
        """Divide an ordered list of copies into an ordered list of groups.

        The copies of a group share source and target tier, and no two copies write the same block.
        """
        groups: list[list[BlockCopy]] = []
        written: set[int] = set()
        way: tuple[KVTier, KVTier] | None = None
        for copied in copies:
            if way != (copied.source, copied.target) or copied.target_block in written:
                way = copied.source, copied.target
                groups.append([])
                written.clear()
            groups[-1].append(copied)
            written.add(copied.target_block)
        return [self._group(group) for group in groups]

    def _group(self, copies: Sequence[BlockCopy]) -> CopyGroup:
        source, target = self._pools[copies[0].source], self._pools[copies[0].target]
        old = torch.tensor([copied.source_block for copied in copies])
        new = torch.tensor([copied.target_block for copied in copies])
        return CopyGroup(
            source,
            slots_of(old, source.block_size),
            target,
            slots_of(new, target.block_size),
            from_pages=copies[0].source.host_attends,
            to_pages=copies[0].target.host_attends,
        )
