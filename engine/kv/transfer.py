"""Ways between host and device memory; on a GPU through memory that is pinned, if it can be, and reused.

Without a GPU both are the same memory, and the same functions run on it.
"""

import math

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.kv.layer import KVLayer, Rows
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Patience
from neo_desktop.models.config import ModelConfig

TOKENS_AT_ONCE = 4096  # whose rows are on their way, unless a caller has more in one piece


class HostBuffer:
    """Host memory that transfers go through, see `cuda.copies`; grows, and is not given back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor. All views share it, and whoever takes one must know them unused."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            size = max(num_bytes, 2 * len(self._bytes))
            self._bytes = host_memory(
                lambda pin: torch.empty(size, dtype=torch.uint8, pin_memory=pin), self._device
            )
        return self._bytes[:num_bytes].view(dtype).view(shape)


class Carrier:
    """Brings rows, in the model's dtype, to the other memory; used by one thread, on its current stream.

    K and V cross the bus as one piece.

    Args:
        config: the model's.
        dtype: likewise.
        device: likewise: what is beside host memory.
        patience: with a copy of some thousand rows, and what is before it on the stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._row_shape = (config.num_kv_heads, config.head_dim)
        self._dtype = dtype
        self._device = device
        self._patience = patience
        self._crosses = device.type != "cpu"
        self._buffer = HostBuffer(device)

    def copy(self, source: KVLayer, source_slots: Tensor, target: KVLayer, target_slots: Tensor) -> None:
        """Copy rows from slots in one place to as many in another."""
        pieces = (torch.split(slots, TOKENS_AT_ONCE) for slots in (source_slots, target_slots))
        for old, new in zip(*pieces, strict=True):
            rows = self._rows_on_device(len(old))
            if source.device.type == "cpu":
                self.fetch(source, old, rows)
            else:
                source.read(old, rows)
            k, v = self._to_host(rows) if target.device.type == "cpu" else rows
            target.write(k, v, new)

    def fetch(self, source: KVLayer, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots in host memory to `out`, on the device."""
        if not self._crosses:
            source.read(slots, out)
            return
        pieces = torch.split(slots, TOKENS_AT_ONCE), torch.split(out, TOKENS_AT_ONCE, dim=1)
        for piece, rows in zip(*pieces, strict=True):
            staged = self._staged(len(piece))
            source.read(piece, staged)
            rows.copy_(staged, non_blocking=True)
            self._synchronize()  # `staged` is about to be written again

    def to_host(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of the device in host memory, to be used before the next call of any kind."""
        if not self._crosses:
            return k, v
        k, v = self._to_host(torch.stack((k, v)))
        return k, v

    def _to_host(self, rows: Rows) -> Rows:
        if not self._crosses:
            return rows
        staged = self._staged(rows.shape[1])
        staged.copy_(rows, non_blocking=True)
        self._synchronize()
        return staged

    def _rows_on_device(self, count: int) -> Rows:
        if not self._crosses:
            return self._staged(count)
        # Torch keeps freed memory of a GPU for the next piece.
        return torch.empty((2, count, *self._row_shape), dtype=self._dtype, device=self._device)

    def _staged(self, count: int) -> Rows:
        return self._buffer.view((2, count, *self._row_shape), self._dtype)

    def _synchronize(self) -> None:
        wait_for_gpu(torch.cuda.current_stream(self._device), self._patience.watch(), "a copy of KV")
