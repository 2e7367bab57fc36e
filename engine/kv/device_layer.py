"""KV in a GPU's memory: rows as models make them."""

import torch
from torch import Tensor

from neo_desktop.engine.kernels.dispatch import paged_decode, programs_per_sm, read_rows, write_rows
from neo_desktop.engine.kernels.splits import num_splits
from neo_desktop.engine.kv.layer import KVLayer, Rows
from neo_desktop.models.config import ModelConfig


class DeviceLayer(KVLayer):
    """One layer in device memory, K and V [num_blocks, block_size, kv_heads, head_dim] each.

    Written, read and attended to by `kernels`. Rows are of the memory's dtype, the model's.
    """

    __slots__ = ("_k", "_num_sms", "_v")

    def __init__(self, parts: tuple[Tensor, ...], block_size: int) -> None:
        super().__init__(parts, block_size)
        self._k, self._v = parts
        self._num_sms = num_sms(self.device)

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return K and V of all layers; compiles the kernels, so that no iteration waits for the compiler."""
        if not dtype.is_floating_point:
            raise ValueError(f"KV in {dtype} is for host memory only")
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        parts = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        cls(tuple(part[0] for part in parts), block_size).launch_all_kernels(config.num_heads)
        return parts

    def launch_all_kernels(self, num_heads: int) -> None:
        """Launch every variant of every kernel that will be needed, with nothing to do."""
        kv_heads, head_dim = self._k.shape[2:]
        q = self._k.new_empty(1, num_heads, head_dim)
        rows = self._k.new_empty(2, 1, kv_heads, head_dim)
        nowhere = torch.full((1,), -1, device=self.device)
        self.write(rows[0], rows[1], nowhere)
        self.read(nowhere, rows)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        for splits in (1, 2):  # without merging and with it
            self._attend(q, zero.view(1, 1), zero, q, splits, 1.0, None)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into slots."""
        write_rows(k, v, self._k, self._v, slots)

    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots to `out`."""
        read_rows(out[0], out[1], self._k, self._v, slots)

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
        splits = self._num_splits(q, window)
        self._attend(q, block_tables, context_lens, out, splits, scale, window)

    def _num_splits(self, q: Tensor, window: int | None) -> int:
        """Into how many parts contexts are cut: as if one request had all blocks.

        How long the longest is only the device knows. Parts that a context is too short for cost next to
        nothing.
        """
        most_tokens = self._k.shape[0] * self.block_size
        kv_heads = self._k.shape[2]
        num_programs = self._num_sms * programs_per_sm(q, self._k, self._v)
        return num_splits(len(q), kv_heads, min(most_tokens, window or most_tokens), num_programs)

    def _attend(
        self,
        q: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        out: Tensor,
        splits: int,
        scale: float,
        window: int | None,
    ) -> None:
        requests, heads, head_dim = q.shape
        # At most a few MB, which torch keeps for the next layer.
        parts = (requests if splits > 1 else 0, heads, splits)
        partial_out = torch.empty((*parts, head_dim), dtype=torch.float32, device=self.device)
        partial_lse = torch.empty(parts, dtype=torch.float32, device=self.device)
        paged_decode(
            q,
            self._k,
            self._v,
            block_tables,
            context_lens,
            out,
            partial_out,
            partial_lse,
            scale,
            window,
        )


def num_sms(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
