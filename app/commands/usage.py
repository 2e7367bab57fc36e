"""Errors in the use of the command line, in sentences of this program instead of pydantic's."""

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

_UNITS = {
    "GIB": "GiB",
    "MIB": "MiB",
    "MIN": "minutes",
    "SECONDS": "seconds",
    "S": "seconds",
    "MS": "ms",
    "SMS": "multiprocessors",
}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "finite": "a finite number"}


class Program(TyperGroup):
    """The commands; wrong values of their options are explained."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = _explained(error.__cause__, error.param)
            raise


def _explained(error: ValidationError, param: Any) -> str:
    first = error.errors(include_url=False)[0]
    kind, given = first["type"], first["input"]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        unit = _unit(param)
        return f"{given} is out of range: give {words} {first['ctx'][key]:g}{f' {unit}' if unit else ''}"
    wanted = _KINDS.get(kind.partition("_")[0])
    if wanted is not None:
        return f"{given!r} is not {wanted}"
    return first["msg"].removeprefix("Value error, ").rstrip(".")


def _unit(param: Any) -> str:
    names = f"{param.name} {' '.join(param.opts)}"
    if "tokens" in names:
        return "tokens"
    return "requests per second" if "--rate" in names else _UNITS.get(param.metavar or "", "")
