"""The memory behind the KV cache: one pair of tensors per place. Knows blocks, not whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.transfer import Carrier
from neo_desktop.engine.placement import Place
from neo_desktop.models.config import ModelConfig


class KVPool:
    """K and V of all blocks of one place, [num_layers, num_blocks, kv_heads, block_size, head_dim] each.

    Within a layer, the tokens of one head in one block are contiguous: that is what the decode kernel
    reads in one go.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.device = device
        self.block_size = block_size
        self.k = torch.empty(size, dtype=dtype, device=device)
        self.v = torch.empty(size, dtype=dtype, device=device)
        if device.type == "cpu":
            # Scattered blocks in 4 KiB pages cost a TLB miss each; before the first write it costs nothing.
            for tensor in (self.k, self.v):
                native.advise_huge_pages(tensor)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer, [num_blocks, kv_heads, block_size, head_dim] each."""
        return self.k[index], self.v[index]


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Copies that can be carried out at once: all read, then all written."""

    source: KVPool
    source_blocks: Tensor  # [n] int64 on the source's device
    target: KVPool
    target_blocks: Tensor  # [n] int64 on the target's device

    def copy_layer(self, layer: int, carrier: Carrier) -> None:
        """Carry them out for one layer."""
        for source, target in zip(self.source.layer(layer), self.target.layer(layer), strict=True):
            blocks = carrier.blocks(source, self.source_blocks, self.target.device)
            target.index_copy_(0, self.target_blocks, blocks)


class KVStorage:
    """`place -> KVPool`."""

    def __init__(self, pools: Mapping[Place, KVPool]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, place: Place) -> KVPool:
        return self._pools[place]

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
