"""How work that takes a while tells how far it is."""

from collections.abc import Callable

Progress = Callable[[float, str], None]  # share done, 0 to 1; what is being done


def part(progress: Progress | None, begin: float, end: float, prefix: str = "") -> Progress:
    """Return what a part of the work reports to: its shares lie between two of the whole.

    Args:
        progress: of the whole; None: nobody wants to know.
        prefix: put before what the part says.
    """

    def tell(share: float, what: str) -> None:
        if progress is not None:
            progress(begin + (end - begin) * share, prefix + what)

    return tell
