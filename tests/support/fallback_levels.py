"""Fallback levels of the process for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neo_desktop.engine.fallbacks import KERNELS, MECHANISMS, Fallbacks, fallbacks


class Levels:
    """Sets levels by `levels(mechanism="level", ...)`; the previous limits and levels return later."""

    def __call__(self, **levels: str) -> None:
        """Set levels until the test ends or a mechanism is limited further."""
        fallbacks.put(levels)


@contextmanager
def kernels_on(level: str) -> Iterator[None]:
    """Put all kernels that have a level on it, others on their highest; a fallback fails the test."""

    def given_up(self: Fallbacks, mechanism: str, lower: str, reason: str) -> bool:
        assert mechanism not in KERNELS, f"{mechanism}: {reason}"
        return limit(self, mechanism, lower, reason)

    limit = Fallbacks.limit
    levels = dict[str, str]()
    for name in KERNELS:
        known = [each.name for each in MECHANISMS[name].levels]
        levels[name] = level if level in known else known[0]
    with pytest.MonkeyPatch.context() as patch, fallbacks.at_levels(levels):
        patch.setattr(Fallbacks, "limit", given_up)
        yield


@contextmanager
def restored_fallbacks() -> Iterator[Levels]:
    """Restore the process's fallbacks at the end."""
    with fallbacks.at_levels({}):
        yield Levels()
