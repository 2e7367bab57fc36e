"""The memory behind the KV cache: a pool of blocks per place. Knows blocks, not whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.layout import BlockLayout
from neo_desktop.engine.kv.transfer import Carrier
from neo_desktop.engine.placement import Place
from neo_desktop.models.config import ModelConfig

BLOCKS_AT_ONCE = 256  # are copied between two memories


class KVPool:
    """K and V of all blocks of one place.

    On a CPU, blocks of a multiple of 16 tokens have K in pairs of dimensions, which the decode kernel reads
    fastest; elsewhere everything lies in rows.

    Args:
        config: the model's.
        num_blocks: in each layer.
        block_size: tokens per block.
        dtype: of K and V; int8 (on a CPU only): rows have scales, see `BlockLayout`.
        device: whose memory it is.

    Raises:
        ValueError: int8 was asked for where it cannot be.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = BlockLayout.of(config, block_size, dtype, device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.parts = tuple(  # [num_layers, num_blocks, ...] each
            torch.empty((config.num_layers, num_blocks, *shape), dtype=part_dtype, device=device)
            for shape, part_dtype in self.layout.parts
        )
        if device.type == "cpu":
            # Scattered blocks in 4 KiB pages cost a TLB miss each, and threads of all NUMA nodes read all of
            # them; before the first write both cost nothing.
            for part in self.parts:
                native.advise_huge_pages(part)
                native.interleave_numa_nodes(part)
        self._layers = [
            KVLayer(self.layout, tuple(part[index] for part in self.parts))
            for index in range(config.num_layers)
        ]

    def layer(self, index: int) -> KVLayer:
        """Return one layer."""
        return self._layers[index]


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies that can be carried out at once: all read, then all written."""

    source: KVPool
    source_blocks: Tensor  # [n] int64 on the source's device
    target: KVPool
    target_blocks: Tensor  # [n] int64 on the target's device

    def copy_layer(self, layer: int, carrier: Carrier) -> None:
        """Carry them out for one layer.

        Blocks cross the bus as they lie in host memory. Where the two places differ in layout or dtype, the
        device changes that: it has more bandwidth, and the CPU's is what attention waits for.
        """
        source, target = self.source.layer(layer), self.target.layer(layer)
        # Within one pool a block may be read and written. Between two, pieces need less memory on the way.
        at_once = len(self.source_blocks) if self.source is self.target else BLOCKS_AT_ONCE
        old_pieces, new_pieces = (
            torch.split(blocks, at_once) for blocks in (self.source_blocks, self.target_blocks)
        )
        for old, new in zip(old_pieces, new_pieces, strict=True):
            if source.device.type == "cpu":
                parts = carrier.blocks(source.parts, old, target.device)
                target.put(new, target.layout.adopted(parts, source.layout))
            else:
                parts = target.layout.adopted(source.take(old), source.layout)
                target.put(new, carrier.to_host(parts) if target.device.type == "cpu" else parts)


class KVStorage:
    """`place -> KVPool`."""

    def __init__(self, pools: Mapping[Place, KVPool]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, place: Place) -> KVPool:
        return self._pools[place]

    def get(self, place: Place) -> KVPool | None:
        """Return the pool of a place; None if the policy does not use it."""
        return self._pools.get(place)

    def copy_groups(self, copies: Sequence[BlockCopy]) -> list[CopyGroup]:
        """Cut copies that must be carried out in their order into groups to be carried out in theirs.

        A block may be read by one copy and written by a later one: such copies may share a group. Not so
        those that read or write what an earlier one wrote.
        """
        groups: list[list[BlockCopy]] = []
        written: set[tuple[Place, int]] = set()
        for copy in copies:
            target = (copy.target, copy.target_block)
            fits = (
                groups
                and (copy.source, copy.target) == (groups[-1][0].source, groups[-1][0].target)
                and (copy.source, copy.source_block) not in written
                and target not in written
            )
            if not fits:
                groups.append([])
                written.clear()
            groups[-1].append(copy)
            written.add(target)
        return [self._group(group) for group in groups]

    def _group(self, copies: Sequence[BlockCopy]) -> CopyGroup:
        source, target = self._pools[copies[0].source], self._pools[copies[0].target]
        return CopyGroup(
            source,
            torch.tensor([copy.source_block for copy in copies], device=source.device),
            target,
            torch.tensor([copy.target_block for copy in copies], device=target.device),
        )
