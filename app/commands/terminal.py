"""The consoles and the log of every command."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

stdout = Console()
stderr = Console(stderr=True)


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[float, str], None]]:
    """Show a bar until the work is done; yield the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share, what: progress.update(task, completed=share, description=escape(what))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 1))
    for label, text in rows:
        table.add_row(label, Text(text))
    stdout.print(table, highlight=False)


def set_up_logging(debug: bool) -> None:
    """Show warnings, with --debug everything."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=stderr, show_path=debug)],
        force=True,
    )
