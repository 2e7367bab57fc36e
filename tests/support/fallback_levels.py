"""Fallback levels of the process for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neo_desktop.engine.fallbacks import KERNELS, Fallbacks, fallbacks


class Levels:
    """Sets levels by `levels(mechanism="level", ...)`; the previous limits and levels return later."""

    def __call__(self, **levels: str) -> None:
        """Set levels until the test ends or a mechanism is limited further."""
        fallbacks.put(levels)


@contextmanager
def kernels_on(level: str) -> Iterator[None]:
    """Put all kernels on a level; a fallback to a lower level fails the test."""

    def given_up(self: Fallbacks, mechanism: str, lower: str, reason: str) -> bool:
        assert mechanism not in KERNELS, f"{mechanism}: {reason}"
        return limit(self, mechanism, lower, reason)

    limit = Fallbacks.limit
    with pytest.MonkeyPatch.context() as patch, fallbacks.at_levels(dict.fromkeys(KERNELS, level)):
        patch.setattr(Fallbacks, "limit", given_up)
        yield


@contextmanager
def restored_fallbacks() -> Iterator[Levels]:
    """Restore the process's fallbacks at the end."""
    with fallbacks.at_levels({}):
        yield Levels()
