"""Conversion of option values from Python: paths, lists, NumPy numbers, torch dtypes."""

import operator
import os
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, cast


def stated(name: str, kinds: tuple[type, ...], value: object, choices: tuple[str, ...] = ()) -> Any:
    """Return a value in one of the types of its option, which the error names.

    Args:
        choices: valid texts; `torch.float16` names "float16".
    """
    if value is None and NoneType in kinds:
        return None
    if choices and not isinstance(value, str):
        return str(value).removeprefix("torch.")
    for kind, convert, _ in _CONVERTERS:
        if kind in kinds:
            try:
                return convert(value)
            except (TypeError, ValueError):
                continue
    wanted = " or ".join(words for kind, _, words in _CONVERTERS if kind in kinds)
    raise ValueError(f"{name} must be {wanted}, got {value!r}")


def joined(name: str, value: object) -> object:
    """Return a list in command-line form, with commas; return a number as digits.

    Raises:
        ValueError: an element is neither text nor a pair of host and port.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return value
    parts = [_part(each) for each in value]
    if any(part is None or not part.strip() for part in parts):
        raise ValueError(f"{name} must hold texts such as 'HOST:PORT', got {value!r}")
    return ",".join(map(str, parts)) or None


def _part(value: object) -> str | None:
    match value:
        case str():
            return value
        case (str(host), int(port)) if not isinstance(port, bool):
            return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        case _:
            return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _path(value: Any) -> Path:
    return Path(os.fspath(value))


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return float("inf") if cast("Any", value) > 0 else float("-inf")


# (type of an option, converter, words for the error); the first match is used.
_CONVERTERS = (
    (str, _text, "text"),
    (Path, _path, "a path"),
    (int, _whole, "a whole number"),
    (float, _number, "a number"),
)
