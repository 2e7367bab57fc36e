"""Sets rungs of the process's ladder for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

from neo_desktop.engine.ladder import ladder


class Rungs:
    """`rungs(mechanism="rung", ...)` within a test; any limits and rungs are those from before afterwards."""

    def __call__(self, **rungs: str) -> None:
        """Let mechanisms stand on rungs until the test ends, or they are limited further."""
        ladder.put(rungs)


@contextmanager
def restored_ladder() -> Iterator[Rungs]:
    """Give the process's ladder back as it was."""
    with ladder.standing_on({}):
        yield Rungs()
