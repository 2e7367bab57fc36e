"""The body of `neo-desktop doctor --measure`: finds or measures the tables of a model, and shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.profile_cache import load_or_profile, profile_key, profile_path
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.setup import MEASURING, set_up

_CURVES = (
    ("linear", "tokens"),
    ("head", "rows"),
    ("offload", "requests"),
    ("transfer", "tokens"),
    ("first_chunk_attention", "tokens of a prompt's first chunk"),
)


@dataclass(frozen=True, slots=True)
class MeasuredTables:
    """Tables and where they are kept."""

    model: str
    key: dict[str, Any]
    path: Path
    tables: TableCostModel
    note: str | None = None  # of a slice of the GPU

    def print(self, console: Console) -> None:
        """Print every table, in milliseconds for one layer."""
        key = self.key
        where = key["gpu"]["name"] if key["gpu"] else key["cpu"]
        differs = key["cpu_cache_dtype"] != key["dtype"]
        dtype = f"{key['dtype']}, CPU-cache {key['cpu_cache_dtype']}" if differs else key["dtype"]
        console.print(f"{self.model} on {where}, {dtype}; milliseconds for one layer", highlight=False)
        if self.note is not None:
            console.print(self.note, highlight=False)
        for name, unit in _CURVES:
            curve = getattr(self.tables, name)
            some = [*curve.x[: -1 : max(len(curve.x) // 6, 1)], curve.x[-1]]
            console.print(_table(f"{name}, by {unit}", some, [("", [curve(x) for x in some])]))
        chunks = self.tables.later_chunk_attention
        surfaces = {("later_chunk_attention", "tokens of a chunk", "context at its end"): chunks}
        attention = self.tables.attention
        for place, table in attention.items():
            same = [other for other in attention if other.host_attends and not place.host_attends]
            if same and not key["gpu"] and not differs:
                same_as = f"the same as {same[0].label}_attention"
                console.print(f"{place.label}_attention: without a GPU {same_as}", highlight=False)
            else:
                surfaces[f"{place.label}_attention", "requests", "mean context"] = table
        for (name, x_unit, y_unit), surface in surfaces.items():
            rows = [(f"{x:g}", row) for x, row in zip(surface.x, surface.ms, strict=True)]
            console.print(_table(f"{name}, by {x_unit} (rows) and {y_unit} (columns)", surface.y, rows))
        console.print(f"Kept in {self.path}", highlight=False, soft_wrap=True)

    def to_json(self) -> dict[str, Any]:
        """Return the tables and their key."""
        return {"key": self.key, "path": str(self.path), "tables": self.tables.to_json()}


def run_measure(options: EngineOptions, progress: Progress, *, refresh: bool = False) -> MeasuredTables:
    """Load the model, then find or measure its tables; raises what `Engine.from_pretrained` raises."""
    parts = set_up(options, progress)
    decoder, streams = parts.model.decoder, parts.model.streams
    measuring = part(progress, 0.0, 1.0, MEASURING)
    tables = load_or_profile(
        decoder, parts.storage, parts.limits, measuring, streams=streams, refresh=refresh
    )
    key = profile_key(decoder, parts.storage, parts.limits, streams)
    return MeasuredTables(parts.model.name, key, profile_path(key), tables, streams.note)


def _table(title: str, columns: Sequence[float], rows: Sequence[tuple[str, Sequence[float]]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("", *(f"{value:g}" for value in columns)):
        table.add_column(heading, justify="right")
    for name, values in rows:
        table.add_row(name, *(f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" for ms in values))
    return table
