"""Types of PTX: a register's bits as numbers, and back.

bf16 numbers are float32 arrays. A packed type, of two numbers in a register, has arrays [threads, 2].
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
UNSIGNED = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


class Format(NamedTuple):
    """Reads and writes the bits of one type."""

    bits: int
    is_float: bool
    is_signed: bool
    numbers: Callable[[Array], Array]
    raw: Callable[[Array], Array]


def from_bf16(raw: Array) -> Array:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def to_bf16(numbers: Array) -> Array:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)


def _viewed(dtype: str, bits: int, *, is_float: bool = False) -> Format:
    kind = np.dtype(dtype)
    count = bits // 8 // kind.itemsize

    def numbers(raw: Array) -> Array:
        found = np.ascontiguousarray(raw).view(kind)
        return found if count == 1 else found.reshape(-1, count)

    def raw(numbers: Array) -> Array:
        found = np.ascontiguousarray(numbers, kind).view(UNSIGNED[bits])
        return found if count == 1 else found[:, 0]

    return Format(bits, is_float, kind.kind == "i", numbers, raw)


def _pairs_of_bf16(raw: Array) -> Array:
    return from_bf16(np.ascontiguousarray(raw).view(np.uint16)).reshape(-1, 2)


FORMATS = {
    "pred": Format(1, False, False, lambda raw: raw, lambda numbers: numbers.astype(bool)),
    **{f"{kind}{bits}": _viewed(f"u{bits // 8}", bits) for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": _viewed(f"i{bits // 8}", bits) for bits in (8, 16, 32, 64)},
    **{f"f{bits}": _viewed(f"f{bits // 8}", bits, is_float=True) for bits in (16, 32, 64)},
    "f16x2": _viewed("f2", 32, is_float=True),
    "f32x2": _viewed("f4", 64, is_float=True),
    "bf16": Format(16, True, False, from_bf16, to_bf16),
    "bf16x2": Format(32, True, False, _pairs_of_bf16, lambda numbers: to_bf16(numbers).view(np.uint32)[:, 0]),
}


@cache
def immediate(text: str, kind: str) -> Array:
    """Return the bits of a constant, [1]."""
    dtype = UNSIGNED[FORMATS[kind].bits]
    if text[:2] in ("0f", "0d"):  # the bits of a float
        value = int(text[2:], 16)
        if text[1] == "f" and dtype.itemsize == 2:
            raise NotImplementedError(f"{text} in 16 bits")
    else:
        value = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.array([value != 0])
    return np.array([value % 2 ** (8 * dtype.itemsize)], dtype)


def resized(raw: Array, bits: int, *, is_signed: bool = False) -> Array:
    """Return raw bits in another width: cut off, or extended by the sign or zeros."""
    if raw.dtype == UNSIGNED[bits]:
        return raw
    if is_signed:
        raw = raw.view(f"i{raw.itemsize}")
    return raw.astype(f"i{bits // 8}" if is_signed else UNSIGNED[bits]).view(UNSIGNED[bits])
