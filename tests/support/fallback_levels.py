"""Sets levels of the process's fallbacks for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neo_desktop.engine.fallbacks import Fallbacks, fallbacks


class Levels:
    """`levels(mechanism="level", ...)` within a test; the limits and levels from before are restored."""

    def __call__(self, **levels: str) -> None:
        """Let mechanisms stand on levels until the test ends, or they are limited further."""
        fallbacks.put(levels)


KERNELS = ("paged_decode", "rope_append", "norm", "activation", "row_copy", "quantised", "experts")


@contextmanager
def kernels_on(level: str) -> Iterator[None]:
    """Let all kernels stand on a level; one that gives up, for a lower one to serve, fails the test."""

    def given_up(self: Fallbacks, mechanism: str, lower: str, reason: str) -> bool:
        assert mechanism not in KERNELS, f"{mechanism}: {reason}"
        return limit(self, mechanism, lower, reason)

    limit = Fallbacks.limit
    with pytest.MonkeyPatch.context() as patch, fallbacks.at_levels(dict.fromkeys(KERNELS, level)):
        patch.setattr(Fallbacks, "limit", given_up)
        yield


@contextmanager
def restored_fallbacks() -> Iterator[Levels]:
    """Give the process's fallbacks back as it was."""
    with fallbacks.at_levels({}):
        yield Levels()
