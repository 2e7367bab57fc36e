"""KV in GPU memory, in the model's row layout."""

from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.kernels.dispatch import (
    paged_decode,
    programs_per_sm,
    read_rows,
    write_rows,
)
from neo_desktop.engine.kernels.occupancy import num_splits
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, KVShape, Partials, Rows
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.operators import Store


class DeviceLayer(KVLayer):
    """One layer in device memory, K and V [num_blocks, block_size, kv_heads, head_dim] each, or K alone.

    `kernels` write, read and attend. Rows have the model's dtype, which is also the memory's.
    """

    __slots__ = ("_k", "_num_sms", "_parts", "_v")

    fused_kv_append = True  # with the rotation

    def _bind(self, *parts: Tensor) -> None:
        self._parts = parts
        self._k, self._v = parts[0], parts[-1]
        self._num_sms = num_sms(self.device)

    @classmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Allocate K and V for every layer, and compile the kernels, so that no iteration has to."""
        if not dtype.is_floating_point:
            raise ValueError(f"KV in {dtype} is for host memory only")
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        parts = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.kv_parts))
        sinks = torch.zeros(config.num_heads, device=device) if config.attention_sinks else None
        spec = AttentionSpec(1.0, None, sinks, config.attention_softcap)
        first = cls(tuple(part[0] for part in parts), block_size, spec)
        first.launch_all_kernels(config.num_heads)
        return parts

    def launch_all_kernels(self, num_heads: int) -> None:
        """Launch every kernel variant on empty input, to compile it."""
        kv_heads, head_dim = self._k.shape[2:]
        q = self._k.new_empty(1, num_heads, head_dim)
        rows = self._k.new_empty(len(self._parts), 1, kv_heads, head_dim)
        no_slot = torch.full((1,), -1, device=self.device)
        self.write(rows[0], rows[-1], no_slot)
        self.read(no_slot, rows)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        for splits in (1, 2):  # without merging and with it
            parts = self._partials(q, 1, splits)
            tensors = q, self._k, self._v, zero.view(1, 1), zero, q, *parts
            paged_decode(*tensors, *self.spec)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        write_rows(k, v, self._k, self._v, slots)

    def read(self, slots: Tensor, out: Rows) -> None:
        read_rows(out[0], out[-1], self._k, self._v, slots)

    def fill(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        for rows, cache in zip((k, v), self._parts, strict=False):
            cache.flatten(0, 1)[first : first + len(rows)].copy_(rows, non_blocking=True)

    def store(self, slots: Tensor) -> Store:
        return Store(slots, self._k, self._v)

    def decode(self, rows: DecodeRows) -> None:
        if rows.k is not None and rows.v is not None and rows.slots is not None:
            self.write(rows.k, rows.v, rows.slots)
        # Only the device knows the longest context. Splits beyond the end of a context cost next to nothing.
        most = min(rows.block_tables.shape[1], self._k.shape[0]) * self.block_size
        parts = (rows.partials or partial(self._partials, rows.q))(min(most, self.spec.window or most))
        tensors = rows.q, self._k, self._v, rows.block_tables, rows.context_lens, rows.out, *parts
        paged_decode(*tensors, *self.spec)

    def _partials(self, q: Tensor, max_tokens: int, splits: int | None = None) -> Partials:
        """Allocate at most a few MB, which torch's allocator keeps for the next layer."""
        if splits is None:
            num_programs = self._num_sms * programs_per_sm(q, self._k, self._v)
            splits = num_splits(len(q), self._k.shape[2], max_tokens, num_programs)
        shape = (len(q) if splits > 1 else 0, q.shape[1], splits)
        out = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=self.device)
        return Partials(out, torch.empty(shape, dtype=torch.float32, device=self.device))


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
