"""KV of a worker in a GPU's memory: rows come from host memory, and the output goes back there."""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layer import Partials, Rows


class GpuLayer(DeviceLayer):
    """One layer in a GPU's memory; all tensors that come and go are in host memory.

    All threads use the GPU's default stream: their work keeps its order.
    """

    __slots__ = ()

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into slots."""
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
        """Store and attend. The slots are those of the last tokens; a context of 0 tokens has none."""
        assert k is not None
        assert v is not None
        last = context_lens.long() - 1
        blocks = block_tables.long().gather(1, (last.clamp(min=0) // self.block_size)[:, None])[:, 0]
        slots = torch.where(last < 0, -1, blocks * self.block_size + last % self.block_size)
        with _current(self.device):
            self.write(k, v, slots)
            of_q, tables, lens = (each.to(self.device) for each in (q, block_tables, context_lens))
            found = torch.empty_like(of_q, memory_format=torch.contiguous_format)
            super().decode(of_q, None, None, None, tables, lens, found, scale, window, partials)
            out.copy_(found)


def _current(device: torch.device) -> torch.cuda.device:
    """Return a context in which a GPU is the thread's current one; of another device it does nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
