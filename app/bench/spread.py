"""What repetitions of one measurement say together, and figures as people read them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some repetitions, and where four fifths of them lie."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Self:
        """Summarise repetitions. Raises ValueError where there are none."""
        values = list(samples)
        if not values:
            raise ValueError("there are no samples to summarise")
        median, p10, p90 = np.quantile(values, (0.5, 0.1, 0.9)).tolist()
        return cls(median, p10, p90, len(values))

    def scaled(self, factor: float) -> Self:
        """The same in another unit; `factor` is above 0."""
        return type(self)(self.median * factor, self.p10 * factor, self.p90 * factor, self.samples)

    @property
    def range(self) -> str:
        """The 10th and 90th percentile."""
        return f"{number(self.p10)}-{number(self.p90)}"

    def __str__(self) -> str:
        """The median, and the 10th and 90th percentile in brackets."""
        return f"{number(self.median)} ({number(self.p10)} - {number(self.p90)})"


def number(value: float) -> str:
    """A number with about three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 999.5:  # more would be 1e+03 in three digits
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
