"""The result of the suite, and its section."""

from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.charts import COLOURS, Line, lines
from neo_desktop.app.bench.section import Plot, Section, Spread, Table
from neo_desktop.app.bench.words import say
from neo_desktop.app.words import binary_size


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement, repeated."""

    what: str  # "host reads"
    of: str  # "2 threads"
    x: float  # the same as a number: threads, rows of a matrix, bytes
    unit: str
    value: Spread


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """The rates of this computer."""

    rounds: int  # repetitions per measurement
    memory_bytes: int  # host memory that reads and copies go over
    last_level_cache_bytes: int  # of the first core; 0: the system does not say
    huge_pages: bool  # the system agreed to them
    isa: str  # of the kernels
    torch_threads: int  # of matrix products on the CPU
    gpu_name: str  # empty: there is no GPU
    gpu_note: str  # why there is none
    gpu_memory_bytes: int  # that reads and copies go over
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    suite: Literal["hardware"] = "hardware"

    def best(self, what: str, lowest: bool = False) -> Figure | None:
        """Return the highest figure of a kind, or the lowest."""
        found = sorted(
            (each for each in self.figures if each.what == what), key=lambda each: each.value.median
        )
        return found[0 if lowest else -1] if found else None

    def section(self) -> Section:
        """A row for each figure, and two pictures."""
        pictures = (
            ("How fast the CPU reads and copies its memory", "threads", ("host reads", "host copies"), False),
            (
                "How fast data crosses the bus between GPU and host",
                "size of one copy",
                ("host to GPU", "GPU to host", "both ways together"),
                True,
            ),
        )
        plots = [
            Plot(title, self._curves(x_label, kinds, is_bytes))
            for title, x_label, kinds, is_bytes in pictures
            if self.best(kinds[0])
        ]
        columns = {"what": "what", "with": "of", "median (p10 - p90)": "value", "unit": "unit"}
        title, summary, *notes = say("hardware", report=self)
        return Section(
            title, summary, (Table.of("", self.figures, columns),), tuple(plots), (*notes, *self.notes)
        )

    def _curves(self, x_label: str, kinds: tuple[str, ...], is_bytes: bool) -> str:
        curves = [
            Line(kind, [(each.x, each.value.median) for each in self.figures if each.what == kind], colour)
            for kind, colour in zip(kinds, COLOURS, strict=False)
        ]
        names = binary_size if is_bytes else "{:g}".format
        return lines(curves, x_label, "GB/s", log_x=True, log_y=is_bytes, x_names=names)
