"""Norms without a pattern, recognised operator by operator while a stage is lowered."""

from dataclasses import dataclass, replace
from typing import Any

from neo_desktop.models.traced.places import NotRowsError, Value


@dataclass(frozen=True, slots=True)
class RootMean:
    """The first operators of 1 / sqrt(mean(x²) + eps), over the last dimension."""

    x: Value
    steps: int = 1
    eps: float = 0.0


def root_mean(name: str, args: tuple[Any, ...]) -> RootMean:
    """Return the next operator's result; raise NotRowsError for other arguments."""
    x = args[0]
    if name == "pow" and isinstance(x, Value) and args[1] == 2:
        return RootMean(x)
    if name == "mean" and isinstance(x, RootMean) and x.steps == 1 and list(args[1]) == [-1]:
        return replace(x, steps=2)
    if name == "add" and isinstance(x, RootMean) and x.steps == 2:
        return replace(x, steps=3, eps=args[1])
    if name == "rsqrt" and isinstance(x, RootMean) and x.steps == 3:
        return replace(x, steps=4)
    raise NotRowsError(f"{name} has no step")
