"""What a suite has to say, in a form that every output can show: terminal, Markdown, HTML, comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are to be read; the first column is set left, the others right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, drawn only where one is wanted: matplotlib is slow to load."""

    name: str  # of its file, without suffix
    title: str  # what it shows, also for those who cannot see it
    draw: Callable[["Figure"], None]
    inches: tuple[float, float] = (5.4, 3.4)  # narrow: letters stay readable on a phone


@dataclass(frozen=True, slots=True)
class Section:
    """One suite's part of the page."""

    title: str
    summary: str  # what was found, in a sentence or two
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()  # where the figures flatter, or what they cannot say
    tables_are_details: bool = False  # the plots say what most people want to know


@dataclass(frozen=True, slots=True)
class Metric:
    """A headline figure that can be set beside that of another run."""

    name: str  # never changes its meaning: "throughput.auto.output_tokens_per_s"
    value: float
    unit: str
    higher_is_better: bool = True
