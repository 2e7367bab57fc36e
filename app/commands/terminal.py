"""The consoles and the log of every command."""

import logging

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

stdout = Console()
stderr = Console(stderr=True)


def progress_bar() -> Progress:
    """Return a bar that is gone when its work is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    )


def set_up_logging(debug: bool) -> None:
    """Show warnings, with --debug everything."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=stderr, show_path=debug)],
        force=True,
    )
