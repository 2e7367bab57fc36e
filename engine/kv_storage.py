"""The memory behind the KV cache: one pair of tensors per place. Knows blocks, not whose they are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.batch import BlockCopy
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


class KVStorage:
    """`place -> KVPool`."""

    def __init__(self, pools: Mapping[Place, KVPool]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, place: Place) -> KVPool:
        return self._pools[place]

    def get(self, place: Place) -> KVPool | None:
        """Return the pool of a place; None where the policy does not use it."""
        return self._pools.get(place)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out the copies in their order: a block may be read here and written by a later copy."""
        for copy in copies:
            source, target = self._pools[copy.source], self._pools[copy.target]
            target.k[:, copy.target_block].copy_(source.k[:, copy.source_block])
            target.v[:, copy.target_block].copy_(source.v[:, copy.source_block])
