"""What repetitions of one measurement say together, and figures as people read them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


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
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("there are no samples to summarise")
        return cls(_quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))

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


def _quantile(ordered: list[float], share: float) -> float:
    """Interpolate linearly between the two samples around it."""
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
