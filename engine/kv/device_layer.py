"""KV in a GPU's memory: rows as models make them."""

import torch
from torch import Tensor

from neo_desktop.engine.kv.gathered_attention import gathered_decode_attention
from neo_desktop.engine.kv.layer import KVLayer, Rows
from neo_desktop.models.config import ModelConfig


class DeviceLayer(KVLayer):
    """One layer in device memory, K and V [num_blocks, block_size, kv_heads, head_dim] each.

    All of it is done by torch. Rows are of the memory's dtype, the model's.
    """

    __slots__ = ("_k", "_v")

    def __init__(self, parts: tuple[Tensor, ...], block_size: int) -> None:
        super().__init__(parts, block_size)
        self._k, self._v = parts

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return K and V of all layers."""
        if not dtype.is_floating_point:
            raise ValueError(f"KV in {dtype} is for host memory only")
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into slots."""
        self._k.flatten(0, 1).index_copy_(0, slots, k)
        self._v.flatten(0, 1).index_copy_(0, slots, v)

    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots to `out`."""
        torch.index_select(self._k.flatten(0, 1), 0, slots, out=out[0])
        torch.index_select(self._v.flatten(0, 1), 0, slots, out=out[1])

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
    ) -> None:
        """Store, then attend."""
        self.write(k, v, slots)
        out.copy_(gathered_decode_attention(q, self._k, self._v, block_tables, context_lens, scale, window))
