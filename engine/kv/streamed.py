"""Streamed KV: KV in host memory that is copied to the device layer by layer for attention there (Pie).

Some layers are resident: their KV stays on the device, so that the device has work while the first other
layer is on its way. The others take turns in a prefetch buffer with a few slots. A slot holds one layer:

    layer      0         1       2       3       4       5       ..
    stored in  device    host    host    host    host    host
    slot                 0       1       0       1       0

A block has the same number in all layers and memories. So a request has one block table, and attention sees
the usual layout. In host memory rows are ordered by slot, not divided by heads or pages, so that one copy
moves neighbouring slots.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.pinned import kv_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.host_layer import give_back_pages
from neo_desktop.engine.kv.layer import KVLayer, Rows
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, PoolRows, memory_of
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig

NUM_RESIDENT = 1  # layers that stay on the device
WINDOW = 2  # slots of the prefetch buffer: the device attends to one layer while the next one arrives


class BlockRun(NamedTuple):
    """Consecutive blocks."""

    first: int
    num_blocks: int


class StreamedPool(KVPool):
    """K and V of every block of a streamed tier.

    Args:
        device: The device that attends.
    """

    # Copies include gaps of up to this size between two runs. A bus of 25 GB/s takes about 10 µs for the gap,
    # as long as the start of another copy.
    bridged_bytes = 256 * 1024

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: type[KVLayer] | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        num_layers = config.num_layers
        resident = min(NUM_RESIDENT, num_layers)
        # Resident layers are spread evenly, and so are the copies. The first layer is resident.
        streamed = [layer for layer in range(num_layers) if layer * resident % num_layers >= resident]
        self._turns = {layer: turn for turn, layer in enumerate(streamed)}
        own = iter(range(resident))
        slots = [
            resident + self._turns[layer] % WINDOW if layer in self._turns else next(own)
            for layer in range(num_layers)
        ]
        super().__init__(config, num_blocks, block_size, dtype, device, kind, sinks, slots)
        # K and V, if they differ, of the streamed layers, [layers, slots, kv_heads, head_dim] each.
        parts, *rows = self.rows_shape(num_blocks * block_size)
        shape = parts, len(streamed), *rows
        if device.type == "cuda":
            memory = kv_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            memory = torch.empty(shape, dtype=dtype)
        self.homes = memory.unbind()
        self._is_pinned = device.type == "cuda" and fallbacks.level("host_memory") == "pinned"

    @property
    def fused_kv_append(self) -> bool:
        """False: during the rotation, the layer may still be on its way."""
        return False

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        return tuple(self._turns)

    def turn(self, layer: int) -> int | None:
        """Return the index of a layer among the streamed layers; None: the layer is resident."""
        return self._turns.get(layer)

    def runs_of(self, blocks: NDArray[np.int32]) -> list["BlockRun"]:
        """Return the runs to copy for these blocks, which may contain duplicates.

        The runs include small gaps, which take less time than another copy.
        """
        block_bytes = math.prod(self.rows_shape(self.block_size)) * self.dtype.itemsize
        return [BlockRun(*run) for _, *run in _runs(np.unique(blocks), self.bridged_bytes // block_bytes)]

    def bring(self, layer: int, runs: Sequence["BlockRun"]) -> None:
        """Start copies of a streamed layer's runs to its slot of the prefetch buffer."""
        turn, there = self._turns[layer], self.layer(layer)
        k, v = self.homes[0], self.homes[-1]
        for first_block, num_blocks in runs:
            begin, end = (block * self.block_size for block in (first_block, first_block + num_blocks))
            there.fill(k[turn, begin:end], v[turn, begin:end], begin)

    @property
    def block_bytes(self) -> int:
        """Bytes of host memory per block that can be given back; pinned memory cannot."""
        homes = 0 if self._is_pinned else sum(home.nbytes for home in self.homes)
        return super().block_bytes + homes // max(self.num_blocks, 1)

    def give_back(self, num_blocks: int) -> int:
        begin = num_blocks * self.block_size
        return super().give_back(num_blocks) + sum(give_back_pages(home, begin) for home in self.homes)

    def rows_at(self, slots: Tensor) -> "StreamedRows":
        return StreamedRows(self, slots)

    def store(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows of every streamed layer in host memory. No iteration may be in flight.

        Args:
            slots: [tokens] int64 in host memory.
            rows: [streamed layers, kv_parts, tokens, kv_heads, head_dim] in host memory.
        """
        for index, home in enumerate(self.homes):
            native.store_rows(rows[:, index].flatten(-2), slots, home.flatten(-2))


def make_pool(
    tier: KVTier,
    config: ModelConfig,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    sinks: Sequence[Tensor] | None,
) -> KVPool:
    """Make the pool of a tier for a model on `device`; arguments as in `KVPool`."""
    if tier.is_streamed:
        return StreamedPool(config, num_blocks, BLOCK_SIZE, dtype, device, sinks=sinks)
    return KVPool(config, num_blocks, BLOCK_SIZE, dtype, memory_of(tier, device), sinks=sinks)


def layers_of(num_layers: int) -> tuple[int, int]:
    """Return the number of layers of a streamed block on the device and in host memory."""
    num_streamed = max(num_layers - NUM_RESIDENT, 0)
    return num_layers - num_streamed + min(WINDOW, num_streamed), num_streamed


class StreamedRows(PoolRows):
    """Rows of a streamed pool: streamed layers are read from and written to host memory."""

    def __init__(self, pool: StreamedPool, slots: Tensor) -> None:
        super().__init__(pool, slots)
        self._streamed = pool
        self._runs = _runs(slots.numpy())

    def read(self, layer: int, out: Rows) -> None:
        turn = self._streamed.turn(layer)
        if turn is None:
            super().read(layer, out)
            return
        for home, rows in zip(self._streamed.homes, out, strict=True):
            for first, slot, count in self._runs:
                rows[first : first + count].copy_(home[turn, slot : slot + count], non_blocking=True)

    def write(self, layer: int, rows: Rows) -> None:
        turn = self._streamed.turn(layer)
        if turn is None:
            super().write(layer, rows)
            return
        for home, values in zip(self._streamed.homes, rows.contiguous(), strict=True):
            for first, slot, count in self._runs:
                home[turn, slot : slot + count].copy_(values[first : first + count], non_blocking=True)


def _runs(numbers: NDArray[Any], most_between: int = 0) -> list[tuple[int, int, int]]:
    """Return `(index of the first, the first, length)` of runs that cover numbers.

    Gaps of up to `most_between` numbers join two runs.
    """
    step = np.diff(numbers, prepend=numbers[:1] - 1)
    begins = np.flatnonzero((step < 1) | (step > most_between + 1) | (np.arange(len(numbers)) == 0)).tolist()
    ends = [*begins[1:], len(numbers)] if begins else []
    return [
        (begin, int(numbers[begin]), int(numbers[end - 1] - numbers[begin]) + 1)
        for begin, end in zip(begins, ends, strict=True)
    ]
