"""Rules for option values, with error messages for users."""

import math
from collections.abc import Sequence
from typing import Any


def at_least(options: Any, least: int, *names: str) -> None:
    """Raise ValueError for smaller numbers, alone or in tuples. None passes."""
    for name in names:
        for value in _values(getattr(options, name)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def above_zero(options: Any, *names: str) -> None:
    """Raise ValueError for numbers that are 0, negative or infinite, alone or in tuples. None passes."""
    for name in names:
        for value in _values(getattr(options, name)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value:g}")


def each_once(options: Any, *names: str) -> None:
    """Raise ValueError for empty tuples and repeated values. None passes."""
    for name in names:
        values: Sequence[object] | None = getattr(options, name)
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ValueError(f"{name} must hold at least one value and none twice, got {values}")


def _values(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
