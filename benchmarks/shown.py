"""Shared parts of the benchmarks: model options, progress, tables."""

import argparse
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from neo_desktop.app.commands.terminal import stdout


def progress(share: float, what: str) -> None:
    print(f"{share:.0%} {what}", flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their headings, the first column to the left."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*map(str, row))
    console = stdout if stdout.is_terminal else Console(width=200)
    console.print(table, highlight=False)


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", help="random weights in this shape; default: the built-in model")
    parser.add_argument("--dtype", default="auto")
    return parser
