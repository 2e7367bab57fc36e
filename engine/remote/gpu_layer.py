"""Worker KV in GPU memory: inputs come from host memory, and outputs return to it."""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layer import Partials, Rows


class GpuLayer(DeviceLayer):
    """One layer in GPU memory; tensors in arguments and results are in host memory.

    All threads use the GPU's default stream, so their work runs in order.
    """

    __slots__ = ()

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store rows in slots."""
        with _current(self.device):
            super().write(k.to(self.device), v.to(self.device), slots.to(self.device))

    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots to `out`."""
        with _current(self.device):
            rows = torch.empty(out.shape, dtype=out.dtype, device=self.device)
            super().read(slots.to(self.device), rows)
            out.copy_(rows)

    def decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        slots: Tensor | None,
        block_tables: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        partials: Callable[[int], Partials] | None = None,
    ) -> None:
        """Store the new K and V, and attend. `slots` has one slot per request; a context of 0 has none."""
        assert k is not None
        assert v is not None
        last = context_lens.long() - 1
        blocks = block_tables.long().gather(1, (last.clamp(min=0) // self.block_size)[:, None])[:, 0]
        slots = torch.where(last < 0, -1, blocks * self.block_size + last % self.block_size)
        with _current(self.device):
            self.write(k, v, slots)
            device_q, tables, lens = (each.to(self.device) for each in (q, block_tables, context_lens))
            device_out = torch.empty_like(device_q, memory_format=torch.contiguous_format)
            super().decode(device_q, None, None, None, tables, lens, device_out, scale, window, partials)
            out.copy_(device_out)


def _current(device: torch.device) -> torch.cuda.device:
    """Return a context in which the GPU is the thread's current device; a no-op for other devices."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
