"""Sets rungs of the process's ladder for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neo_desktop.engine.ladder import Ladder, ladder


class Rungs:
    """`rungs(mechanism="rung", ...)` within a test; any limits and rungs are those from before afterwards."""

    def __call__(self, **rungs: str) -> None:
        """Let mechanisms stand on rungs until the test ends, or they are limited further."""
        ladder.put(rungs)


KERNELS = ("paged_decode", "rope_append", "norm", "activation", "row_copy", "quantised", "experts")


@contextmanager
def kernels_on(rung: str) -> Iterator[None]:
    """Let all kernels stand on a rung; one that gives up, for a lower one to serve, fails the test."""

    def given_up(self: Ladder, mechanism: str, lower: str, reason: str) -> bool:
        assert mechanism not in KERNELS, f"{mechanism}: {reason}"
        return limit(self, mechanism, lower, reason)

    limit = Ladder.limit
    with pytest.MonkeyPatch.context() as patch, ladder.standing_on(dict.fromkeys(KERNELS, rung)):
        patch.setattr(Ladder, "limit", given_up)
        yield


@contextmanager
def restored_ladder() -> Iterator[Rungs]:
    """Give the process's ladder back as it was."""
    with ladder.standing_on({}):
        yield Rungs()
