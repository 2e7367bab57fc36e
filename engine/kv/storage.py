"""The memory behind the KV cache: a pool of blocks per place. Knows blocks, not whose they are."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import KVLayer, slots_of
from neo_desktop.engine.placement import Place
from neo_desktop.models.config import ModelConfig


def layer_kind(device: torch.device) -> type[KVLayer]:
    """Return how KV lies in a device's memory."""
    if device.type == "cpu":
        return HostLayer
    return DeviceLayer


def memory_of(place: Place, device: torch.device) -> torch.device:
    """Return in whose memory a place lies, for a model that runs on `device`."""
    return torch.device("cpu") if place.in_host_memory else device


class KVPool:
    """K and V of all blocks of one place.

    Args:
        config: the model's.
        num_blocks: in each layer.
        block_size: tokens per block.
        dtype: of K and V; int8 is for host memory only.
        device: whose memory it is.
        kind: how it is used; None: as fits the device.
        sinks: those of each layer `[heads]`, of a model that has some; see `KVLayer.decode`.

    Raises:
        ValueError: int8 was asked for where it cannot be.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: type[KVLayer] | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        assert (sinks is not None) == config.attention_sinks
        self.kind = kind or layer_kind(device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.parts = self.kind.allocate(config, num_blocks, block_size, dtype, device)
        self._layers = [
            self.kind(
                tuple(part[index] for part in self.parts),
                block_size,
                None if sinks is None else sinks[index].to(device, torch.float32),
            )
            for index in range(config.num_layers)
        ]

    def layer(self, index: int) -> KVLayer:
        """Return one layer."""
        return self._layers[index]

    def with_layers(self, indices: Iterable[int]) -> "KVPool":
        """Return a pool that has these layers in their order, in the same memory; `parts` stay all of it."""
        pool = copy.copy(self)
        pool._layers = [self._layers[index] for index in indices]
        return pool


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies from one place to another that can be carried out in any order."""

    source: KVPool
    source_slots: Tensor  # [n] int64 on the source's device
    target: KVPool
    target_slots: Tensor  # [n] int64 on the target's device
    is_to_host: bool  # whether the target lies in host memory; the source does otherwise


class KVStorage:
    """`place -> KVPool`."""

    def __init__(self, pools: Mapping[Place, KVPool]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, place: Place) -> KVPool:
        return self._pools[place]

    @property
    def places(self) -> tuple[Place, ...]:
        """Those with a pool."""
        return tuple(self._pools)

    @property
    def block_size(self) -> int:
        """Tokens per block, in all places."""
        return next(iter(self._pools.values())).block_size

    def get(self, place: Place) -> KVPool | None:
        """Return the pool of a place; None if the policy does not use it."""
        return self._pools.get(place)

    def copy_groups(self, copies: Sequence[BlockCopy]) -> list[CopyGroup]:
        """Cut copies that must be carried out in their order into groups to be carried out in theirs.

        All copies of a group go the same way, and no two of them write the same block.
        """
        groups: list[list[BlockCopy]] = []
        written: set[int] = set()
        way: tuple[Place, Place] | None = None
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
        old = upload([each.source_block for each in copies], torch.int64, source.device)
        new = upload([each.target_block for each in copies], torch.int64, target.device)
        return CopyGroup(
            source,
            slots_of(old, source.block_size),
            target,
            slots_of(new, target.block_size),
            is_to_host=copies[0].target.in_host_memory,
        )
