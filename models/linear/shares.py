"""The division of offloaded matrices between bus and CPU, by the number of rows in a product.

Of one row the CPU has most: it reads weights faster than a bus brings them. Products of many rows are
arithmetic, which the device does faster than the bus brings weights, and the CPU does not.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StreamedShares:
    """The share of a matrix's rows in host memory that is streamed, by the rows of a product.

    Raises ValueError for what is none.
    """

    rows: tuple[int, ...]  # rising; products of more rows have the last share
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.shares):
            raise ValueError(f"{len(self.rows)} numbers of rows need as many shares, got {len(self.shares)}")
        if self.rows[0] < 1 or any(b <= a for a, b in pairwise(self.rows)):
            raise ValueError(f"numbers of rows must be positive and rising, got {list(self.rows)}")
        if not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares must be between 0 and 1, got {list(self.shares)}")

    def of(self, rows: int) -> float:
        """Return the share for so many rows."""
        return self.shares[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


FEW_ROWS = 16  # for so many, reading the weights takes the time
UNMEASURED = StreamedShares((FEW_ROWS, FEW_ROWS + 1), (0.0, 1.0))
"""The CPU computes for few rows; weights are streamed for others."""
