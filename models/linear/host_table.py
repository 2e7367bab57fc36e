"""Tables of a GPU in host memory: embeddings, whose rows are looked up but never multiplied.

The GPU reads the rows of an iteration's tokens where they are, across the bus. So tables take no GPU memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.models.linear import unpack
from neo_desktop.models.linear.grouped import Dequantise, Grouped
from neo_desktop.models.linear.packed import Room
from neo_desktop.models.linear.quantised import PartShape

_HOST = torch.device("cpu")


class Kernels(Protocol):
    """Look-ups, also in host memory."""

    @property
    def dequantise(self) -> Dequantise:
        """Counterpart of `grouped.dequantise`."""

    def look_up_rows(self, table: Tensor, rows: Tensor, out: Tensor, /) -> None:
        """Write rows to `out`, see `operators.look_up_rows`."""


@dataclass(frozen=True, slots=True)
class HostTables:
    """The memory and kernels of tables in host memory.

    Args:
        room: allocates host memory that the device can read.
    """

    room: Room
    kernels: Kernels


class HostTable:
    """A `protocol.Embedding`.

    Args:
        part: type of the rows, packed as on a GPU; None: they have `dtype`.
        device: looks up.
    """

    bias: Tensor | None = None

    def __init__(
        self,
        part: PartShape | None,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        tables: HostTables,
    ) -> None:
        self._rows, self._columns = rows, columns
        self._device, self._dtype, self._kernels = device, dtype, tables.kernels
        self.numbers: Tensor | Grouped
        if part is None:
            self.numbers = tables.room(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
        else:
            self.numbers = Grouped(part.type_name, rows, columns, _HOST, tables.room)
        if device.type == "cuda":  # no iteration waits for a compiler
            row = torch.zeros(1, dtype=torch.int32, device=device)
            self.look_up(row, torch.empty(1, columns, dtype=dtype, device=device))

    @property
    def form(self) -> str:
        return self.numbers.type_name if isinstance(self.numbers, Grouped) else "plain"

    def memory(self) -> dict[torch.device, int]:
        return {_HOST: self.numbers.nbytes}

    def load(self, row: int, weight: Tensor) -> None:
        if isinstance(self.numbers, Grouped):
            raise TypeError("this table loads rows only in the file's format")
        self.numbers[row : row + len(weight)].copy_(weight)

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Load rows in the file's format, `[rows, bytes of a row]`; each row once.

        Raises ValueError for scales that are not finite.
        """
        assert isinstance(self.numbers, Grouped)
        unpack.load_stored(self.numbers, row, raw, self._device)

    def dense(self) -> Tensor:
        out = torch.empty(self._rows, self._columns, dtype=self._dtype, device=self._device)
        self.look_up(torch.arange(self._rows, device=self._device), out)
        return out

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        raise TypeError("a table is not multiplied")

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        if isinstance(self.numbers, Grouped):
            self._kernels.dequantise(self.numbers, rows, out)
        else:
            self._kernels.look_up_rows(self.numbers, rows, out)
