"""One layer's K and V in one place: whoever uses it knows rows and blocks, not how they lie."""

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.kv.gathered_attention import gathered_decode_attention
from neo_desktop.engine.kv.layout import BlockLayout, Parts, Rows


class KVLayer:
    """K and V of all blocks of one layer, and the decode attention over them, next to them.

    Rows are [tokens, kv_heads, head_dim]. On a CPU the native kernels write and attend, elsewhere torch does.

    Args:
        layout: of every block.
        parts: the memory, [num_blocks, ...] each, contiguous.
    """

    __slots__ = ("_k", "_k_scale", "_v", "_v_scale", "layout", "parts")

    def __init__(self, layout: BlockLayout, parts: Parts) -> None:
        self.layout = layout
        self.parts = parts
        # As the kernels see it: the tokens of a block before the pairs of dimensions.
        self._k = parts[0].transpose(-3, -2) if layout.in_pairs else parts[0]
        self._v = parts[1]
        self._k_scale: Tensor | None
        self._v_scale: Tensor | None
        self._k_scale, self._v_scale = parts[2:] if layout.is_scaled else (None, None)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._v.device

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into slots.

        Args:
            k: [tokens, kv_heads, head_dim], here; v likewise.
            slots: [tokens] int64: block * block_size + offset.
        """
        if self.device.type == "cpu":
            native.paged_kv_write(k, v, self._k, self._v, slots, k_scale=self._k_scale, v_scale=self._v_scale)
            return
        block_size = self.layout.block_size
        blocks, offsets = slots // block_size, slots % block_size
        self._k[blocks, :, offsets] = k
        self._v[blocks, :, offsets] = v

    def read(self, blocks: Tensor, dtype: torch.dtype) -> Rows:
        """Return K and V of whole blocks, [blocks * block_size, kv_heads, head_dim] each, in a dtype.

        Args:
            blocks: [blocks] int64, here.
        """
        return self.layout.rows(self.take(blocks), dtype)

    def take(self, blocks: Tensor) -> Parts:
        """Return a copy of whole blocks as they lie."""
        return tuple(part.index_select(0, blocks) for part in self.parts)

    def put(self, blocks: Tensor, parts: Parts) -> None:
        """Overwrite whole blocks with parts of this layout."""
        for own, part in zip(self.parts, parts, strict=True):
            own.index_copy_(0, blocks, part)

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
        """Store one new token per request, and attend from it to the request's whole context; all of it here.

        Args:
            q: [requests, heads, head_dim]; out likewise.
            k: [requests, kv_heads, head_dim]; v likewise.
            slots: [requests] int64: where k and v go, the last slot of each context.
            block_tables: [requests, max_blocks] int32
            context_lens: [requests] int32, the new token included.
            scale: the factor on q·k.
            window: how many of the last tokens are attended to; None: all.
        """
        if self.device.type == "cpu":
            native.paged_attention_decode(
                q,
                self._k,
                self._v,
                block_tables,
                context_lens,
                scale,
                out,
                k=k,
                v=v,
                window=window or 0,
                k_scale=self._k_scale,
                v_scale=self._v_scale,
            )
            return
        self.write(k, v, slots)
        out.copy_(gathered_decode_attention(q, self._k, self._v, block_tables, context_lens, scale, window))
