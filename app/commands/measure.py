"""The body of `neo-desktop doctor --measure`: finds or measures the tables of a model, and shows them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
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
            console.print(_curve(name, unit, getattr(self.tables, name)), highlight=False)
        later = self.tables.later_chunk_attention
        surface = _surface("later_chunk_attention", "tokens of a chunk", "context at its end", later)
        console.print(surface, highlight=False)
        attention = self.tables.attention
        for place, table in attention.items():
            name = f"{place.label}_attention"
            same = [other for other in attention if other.host_attends and not place.host_attends]
            if same and not key["gpu"] and not differs:
                same_as = f"the same as {same[0].label}_attention"
                console.print(f"{name}: without a GPU {same_as}", highlight=False)
                continue
            console.print(_surface(name, "requests", "mean context", table), highlight=False)
        console.print(f"Kept in {self.path}", highlight=False, soft_wrap=True)

    def write_json(self, path: Path) -> None:
        """Write tables and their key to a file."""
        data = {"key": self.key, "path": str(self.path), "tables": self.tables.to_json()}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def run_measure(options: EngineOptions, progress: Progress, *, refresh: bool = False) -> MeasuredTables:
    """Load the model, then find or measure its tables; raises what `Engine.from_pretrained` raises.

    Args:
        refresh: measure in any case.
    """
    parts = set_up(options, progress)
    decoder = parts.model.decoder
    tables = load_or_profile(
        decoder,
        parts.storage,
        parts.limits,
        part(progress, 0.0, 1.0, MEASURING),
        streams=parts.model.streams,
        refresh=refresh,
    )
    key = profile_key(decoder, parts.storage, parts.limits, parts.model.streams)
    return MeasuredTables(parts.model.name, key, profile_path(key), tables, parts.model.streams.note)


def _curve(name: str, unit: str, curve: Curve) -> Table:
    some = [*curve.x[: -1 : max(len(curve.x) // 6, 1)], curve.x[-1]]
    table = _table(f"{name}, by {unit}", some)
    table.add_row("", *(_ms(curve(x)) for x in some))
    return table


def _surface(name: str, x_unit: str, y_unit: str, surface: Surface) -> Table:
    table = _table(f"{name}, by {x_unit} (rows) and {y_unit} (columns)", surface.y)
    for x, row in zip(surface.x, surface.ms, strict=True):
        table.add_row(f"{x:g}", *map(_ms, row))
    return table


def _table(title: str, columns: Iterable[float]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", justify="right")
    for value in columns:
        table.add_column(f"{value:g}", justify="right")
    return table


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
