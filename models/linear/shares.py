"""The division of offloaded matrices between bus and CPU, by the number of rows in a matmul.

With one row, most goes to the CPU, because it reads weights faster than the bus transfers them. Matmuls of
many rows are compute-bound: there the device with streamed weights is faster than the CPU.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StreamedShares:
    """Number of rows in a matmul → share of the host's rows that is streamed.

    Raises ValueError for an invalid table.
    """

    rows: tuple[int, ...]  # ascending; matmuls with more rows use the last share
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.shares):
            raise ValueError(f"{len(self.rows)} numbers of rows need as many shares, got {len(self.shares)}")
        if self.rows[0] < 1 or any(b <= a for a, b in pairwise(self.rows)):
            raise ValueError(f"numbers of rows must be positive and ascending, got {list(self.rows)}")
        if not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares must be between 0 and 1, got {list(self.shares)}")

    def of(self, rows: int) -> float:
        return self.shares[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


FEW_ROWS = 16  # up to this number, a matmul is bound by reading the weights
UNMEASURED = StreamedShares((FEW_ROWS, FEW_ROWS + 1), (0.0, 1.0))
"""Few rows use the CPU; more rows stream the weights."""
