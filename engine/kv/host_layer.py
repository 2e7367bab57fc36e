"""KV in host memory, in pages for the CPU's attention kernel."""

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.huge_pages import ask_for_huge_pages
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, KVShape, Rows
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.native.relay import LayerCache

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # None: this OS has none
_SCALE_DIMS = 3  # dimensions of a layer's scales
PAIRED_TOKENS = 16  # the native kernels take K in pairs if block_size is a multiple of this number


class HostLayer(KVLayer):
    """One layer in host memory; the native kernels write, read and attend.

    A run of BLOCKS_PER_RUN blocks is a page. Within a page, the tokens of a head are contiguous. If a request
    owns the whole run, which `BlockPool` arranges, the kernel reads it nearly at memory speed.

        K         [pages, kv_heads, head_dim / 2, page_tokens, 2]: pairs of dimensions, all tokens side by
                  side; V's layout if K is also V, or block_size is no multiple of 16
        V         [pages, kv_heads, page_tokens, head_dim]; per head and page, the values follow the keys
                  in memory, so that the kernel reads long pieces
        K scales  [pages, kv_heads, page_tokens] fp32, for int8 only: a row is its elements times its scale
        V scales  same as K scales
    """

    __slots__ = ("_k", "_k_scale", "_parts", "_v", "_v_scale")

    def _bind(self, *parts: Tensor) -> None:
        scales = [part for part in parts if part.dim() == _SCALE_DIMS]
        k, *others = parts[: len(parts) - len(scales)]
        in_pairs = k.dim() > _SCALE_DIMS + 1
        self._k = k.transpose(-3, -2) if in_pairs else k  # the kernels' order: tokens before pairs
        self._v = others[0] if others else self._k
        self._parts = [self._k, *others, *scales]
        self._k_scale: Tensor | None
        self._v_scale: Tensor | None
        self._k_scale, self._v_scale = (scales[0], scales[-1]) if scales else (None, None)

    @classmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Allocate K, V and, for int8, the scales, for every layer; the last page may be only partly used."""
        is_whole = block_size % PAIRED_TOKENS == 0
        if dtype is torch.int8 and not is_whole:
            raise ValueError(
                f"KV in 8 bits needs blocks of a multiple of {PAIRED_TOKENS} tokens, not of {block_size}"
            )
        page_tokens, dim = BLOCKS_PER_RUN * block_size, config.head_dim
        pages = (config.num_layers, -(-num_blocks // BLOCKS_PER_RUN), config.num_kv_heads)
        memory = empty_aligned((*pages, config.kv_parts, page_tokens * dim), dtype)
        tensors = [memory]
        if dtype is torch.int8:
            tensors += [empty_aligned((*pages, page_tokens), torch.float32) for _ in range(config.kv_parts)]
        for tensor in tensors:
            # Each scattered 4 KiB page would cost a TLB miss, and threads on every NUMA node read all pages.
            # Before the first write, both calls are free.
            ask_for_huge_pages(tensor)
            native.interleave_numa_nodes(tensor)
        k, *others = memory.unbind(-2)
        in_pairs = is_whole and bool(others)
        keys = (dim // 2, page_tokens, 2) if in_pairs else (page_tokens, dim)
        values = (v.view(*pages, page_tokens, dim) for v in others)
        return k.view(*pages, *keys), *values, *tensors[1:]

    @classmethod
    def give_back(cls, parts: tuple[Tensor, ...], num_blocks: int) -> int:
        k, scales = parts[0], [part for part in parts if part.dim() == 1 + _SCALE_DIMS]
        _, num_pages, *_ = k.shape
        # K and V of a head are adjacent: a view from K's first element covers both.
        both = k.as_strided((len(k), num_pages, k.stride(1)), (k.stride(0), k.stride(1), 1))
        return sum(give_back_pages(memory, num_blocks // BLOCKS_PER_RUN) for memory in (both, *scales))

    @property
    def cache(self) -> LayerCache:
        """The layer in the form of native tasks."""
        return LayerCache(
            self._k, self._v, self._k_scale, self._v_scale, self.spec.window or 0, self.spec.sinks
        )

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        native.paged_kv_write(k, v, self._k, self._v, slots, k_scale=self._k_scale, v_scale=self._v_scale)

    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots to `out`, converted to its dtype."""
        k, v = out[0], out[-1]
        native.paged_kv_read(self._k, self._v, slots, k, v, k_scale=self._k_scale, v_scale=self._v_scale)

    def empty_parts(self, count: int) -> list[Tensor]:
        """Return memory for `load_exactly` of `count` rows."""
        return [part.new_empty(count, part.shape[1], *part.shape[3:]) for part in self._parts]

    def load_exactly(self, slots: Tensor, out: Sequence[Tensor]) -> None:
        """Copy K, V and their scales at slots to `out` without conversion, see `empty_parts`."""
        page, row = self._positions(slots)
        for part, values in zip(self._parts, out, strict=True):
            values.copy_(part[page, :, row])

    def store_exactly(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Write parts as from `load_exactly` to slots, all different."""
        page, row = self._positions(slots)
        for part, values in zip(self._parts, parts, strict=True):
            part[page, :, row] = values

    def _positions(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        page_tokens = BLOCKS_PER_RUN * self.block_size
        return slots // page_tokens, slots % page_tokens

    def decode(self, rows: DecodeRows) -> None:
        """Store and attend in one call; the kernel computes the slots itself."""
        native.paged_attention_decode(
            rows.q,
            self._k,
            self._v,
            rows.block_tables,
            rows.context_lens,
            self.spec.scale,
            rows.out,
            block_size=self.block_size,
            k=rows.k,
            v=rows.v,
            window=self.spec.window or 0,
            k_scale=self._k_scale,
            v_scale=self._v_scale,
            sinks=self.spec.sinks,
            softcap=self.spec.softcap or 0.0,
        )


def empty_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor that starts at an OS page boundary, so that KV pages span few OS pages."""
    spare = mmap.PAGESIZE // dtype.itemsize
    memory = torch.empty(math.prod(shape) + spare, dtype=dtype)
    start = -memory.data_ptr() % mmap.PAGESIZE // dtype.itemsize
    return memory[start : start + math.prod(shape)].view(shape)


def give_back_pages(memory: Tensor, begin: int) -> int:
    """Return pages to the system, while their addresses stay reserved; return the number of bytes.

    A later write takes new pages, a later read returns zeros.

    Args:
        memory: [parts, rows, ...], contiguous, in host memory that is not pinned.
        begin: The first unneeded row of every part.

    Raises:
        OSError: The system refuses.
    """
    if _DONT_NEED is None:
        raise OSError("this system takes no memory back from a running program (no MADV_DONTNEED)")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for part in memory:
        start = part.data_ptr() + begin * part.stride(0) * part.element_size()
        end = part.data_ptr() + part.numel() * part.element_size()
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= end:
            continue
        if madvise(start, end - start, _DONT_NEED) != 0:
            raise OSError(ctypes.get_errno(), "the system refuses to take pages back")
        num_bytes += end - start
    return num_bytes
