"""What options may be: each rule is stated once, beside the options, and says what is wrong in a sentence."""

import math
from collections.abc import Sequence
from typing import Any


def at_least(options: Any, least: int, *names: str) -> None:
    """Refuse smaller numbers, alone or in tuples; None is no number. Raises ValueError."""
    for name in names:
        for value in _values(getattr(options, name)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def above_zero(options: Any, *names: str) -> None:
    """Refuse what is 0, negative or infinite, likewise. Raises ValueError."""
    for name in names:
        for value in _values(getattr(options, name)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value:g}")


def each_once(options: Any, *names: str) -> None:
    """Refuse empty tuples and repeated values; None is not looked at. Raises ValueError."""
    for name in names:
        values: Sequence[object] | None = getattr(options, name)
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ValueError(f"{name} must hold at least one value and none twice, got {values}")


def _values(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
