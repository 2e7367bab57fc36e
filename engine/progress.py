"""Progress reports of long operations."""

from collections.abc import Callable

Progress = Callable[[float, str], None]  # share done, 0 to 1; description


def part(progress: Progress | None, begin: float, end: float, prefix: str = "") -> Progress:
    """Return the progress callback of a part, which maps its shares to a range of the whole."""

    def tell(share: float, what: str) -> None:
        if progress is not None:
            progress(begin + (end - begin) * share, prefix + what)

    return tell
