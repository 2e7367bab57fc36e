"""The table of instructions that compute, each thread for itself.

A key is a name without types, and without modifiers that change nothing here: `.rn` is how numpy rounds, and
approximations are exact. A fused multiplication rounds twice, to float64 and to its type.
"""

from collections.abc import Callable

import numpy as np

from .numbers import FORMATS, Array
from .parse import Instruction, Operand
from .threads import Handler, Threads

NEUTRAL = {"rn", "approx", "full", "ftz", "sync", "aligned", "uni", "lo"}
LEAST_NORMAL = np.finfo(np.float32).smallest_normal


def _fused(x: Array, y: Array, z: Array) -> Array:
    if x.dtype.kind != "f":
        return x * y + z
    return (x.astype(np.float64) * y + z).astype(x.dtype)


def _quotient(x: Array, y: Array) -> Array:
    """Round to zero."""
    if x.dtype.kind == "f":
        return x / y
    quotient = np.abs(x.astype(np.int64)) // np.maximum(np.abs(y.astype(np.int64)), 1)
    return np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)


def _remainder(x: Array, y: Array) -> Array:
    found: Array = np.fmod(x, np.where(y == 0, 1, y)).astype(x.dtype)
    return found


def _shifted_left(x: Array, by: Array) -> Array:
    bits = 8 * x.itemsize
    shifted: Array = x << np.minimum(by, bits - 1).astype(x.dtype)
    return np.where(by < bits, shifted, np.zeros_like(shifted))


def _shifted_right(x: Array, by: Array) -> Array:
    bits = 8 * x.itemsize
    shifted: Array = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by < bits, shifted, np.zeros_like(shifted))


def _field(x: Array, first: Array, length: Array) -> Array:
    """Cut `length` bits out, the lowest at `first`; of a signed type the highest is the sign."""
    wide = x.astype(np.int64)
    first, length = first.astype(np.int64) & 255, np.minimum(length.astype(np.int64) & 255, 62)
    found = (wide >> np.minimum(first, 63)) & ((np.int64(1) << length) - 1)
    if x.dtype.kind == "i":
        sign = np.int64(1) << np.maximum(length - 1, 0)
        found = (found ^ sign) - sign
    cut: Array = found.astype(x.dtype)
    return cut


def _permuted(x: Array, y: Array, selectors: Array) -> Array:
    """Select four of the eight bytes of y and x; a selector's bit 3 repeats the byte's sign instead."""
    both = x.astype(np.uint64) | (y.astype(np.uint64) << np.uint64(32))
    found = np.zeros(np.broadcast_shapes(both.shape, selectors.shape), np.uint32)
    for place in range(4):
        selector = (selectors >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> (8 * (selector & 7)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
        byte = np.where(selector & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        found |= byte << np.uint32(8 * place)
    return found


def _any_of_three(x: Array, y: Array, z: Array, table: Array) -> Array:
    """Look up each bit of the result in the table, by the three bits of the operands."""
    found = x & 0
    for row in range(8):
        met = (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        found = found | np.where((table >> np.uint32(row)) & 1, met, met & 0)
    return found


def _funnel(low: Array, high: Array, by: Array, direction: str) -> Array:
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    by = by.astype(np.uint64) & np.uint64(31)
    found: Array = ((both << by) >> np.uint64(32) if direction == "l" else both >> by).astype(np.uint32)
    return found


def _selected(x: Array, y: Array, condition: Array) -> Array:
    found: Array = np.where(condition, x, y)
    return found


def _unordered(x: Array, y: Array) -> Array:
    return np.isnan(x) | np.isnan(y)


# name → function of the operands in the instruction's type.
COMPUTE: dict[str, Callable[..., Array]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mad": _fused,
    "fma": _fused,
    "div": _quotient,
    "rem": _remainder,
    "neg": lambda x: -x,
    "abs": np.abs,
    "min": lambda *x: np.fmin(np.fmin(x[0], x[1]), x[-1]),
    "max": lambda *x: np.fmax(np.fmax(x[0], x[1]), x[-1]),
    "min.NaN": lambda *x: np.minimum(np.minimum(x[0], x[1]), x[-1]),
    "max.NaN": lambda *x: np.maximum(np.maximum(x[0], x[1]), x[-1]),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "tanh": np.tanh,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
}

# name → function, types of the sources; None: the instruction's type.
MIXED: dict[str, tuple[Callable[..., Array], tuple[str | None, ...]]] = {
    "shl": (_shifted_left, (None, "u32")),
    "shr": (_shifted_right, (None, "u32")),
    "bfe": (_field, (None, "u32", "u32")),
    "prmt": (_permuted, ("u32", "u32", "u32")),
    "lop3": (_any_of_three, ("b32", "b32", "b32", "u32")),
    "shf.l.wrap": (lambda low, high, by: _funnel(low, high, by, "l"), ("u32", "u32", "u32")),
    "shf.r.wrap": (lambda low, high, by: _funnel(low, high, by, "r"), ("u32", "u32", "u32")),
    "selp": (_selected, (None, None, "pred")),
}

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda x, y: (x == y) & ~_unordered(x, y),
    "ne": lambda x, y: (x != y) & ~_unordered(x, y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: (x == y) | _unordered(x, y),
    "neu": lambda x, y: x != y,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~_unordered(x, y),
    "nan": _unordered,
}

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
WIDER = {
    "s16": ("s32", np.int32),
    "u16": ("u32", np.uint32),
    "s32": ("s64", np.int64),
    "u32": ("u64", np.uint64),
}


def split(instruction: Instruction) -> tuple[str, list[str]]:
    """Return the name without types and neutral modifiers, and the types."""
    types = [part for part in instruction.parts if part in FORMATS]
    return ".".join(p for p in instruction.parts if p not in FORMATS and p not in NEUTRAL), types


def _flushed(numbers: Array, instruction: Instruction) -> Array:
    """Return numbers; with `.ftz`, those that are too small to be normal become 0."""
    if "ftz" not in instruction.parts or numbers.dtype != np.float32:
        return numbers
    return np.where(np.abs(numbers) < LEAST_NORMAL, np.copysign(np.float32(0), numbers), numbers)


def compute(threads: Threads, instruction: Instruction) -> None:
    name, types = split(instruction)
    into, *sources = instruction.operands
    if len(types) == 2 and name in ("add", "sub", "fma"):
        _compute_mixed(threads, name, types, instruction.operands)
        return
    (kind,) = types
    function, kinds = MIXED[name] if name in MIXED else (COMPUTE[name], (kind,) * len(sources))
    given = [
        _flushed(threads.numbers(each, of or kind), instruction)
        for each, of in zip(sources, kinds, strict=True)
    ]
    threads.write(into, kind, _flushed(function(*given), instruction))


def _compute_mixed(threads: Threads, name: str, types: list[str], operands: tuple[Operand, ...]) -> None:
    """Compute in float32 from smaller numbers and, last, a float32 (from 10.0 on)."""
    into, *sources = operands
    assert types[0] == "f32"
    kinds = [*types[1:] * (len(sources) - 1), "f32"]
    given = [
        threads.numbers(each, kind).astype(np.float32) for each, kind in zip(sources, kinds, strict=True)
    ]
    threads.write(into, "f32", COMPUTE[name](*given))


def multiply_wide(threads: Threads, instruction: Instruction) -> None:
    """Multiply to twice the width; `mad` adds a number of that width."""
    wide, dtype = WIDER[instruction.parts[-1]]
    into, *sources = instruction.operands
    x, y = (threads.numbers(each, instruction.parts[-1]).astype(dtype) for each in sources[:2])
    product = x * y
    if instruction.parts[0] == "mad":
        product = product + threads.numbers(sources[2], wide)
    threads.write(into, wide, product)


def multiply_high(threads: Threads, instruction: Instruction) -> None:
    """Return the upper half of a product."""
    kind = instruction.parts[-1]
    _, dtype = WIDER[kind]
    into, *sources = instruction.operands
    x, y = (threads.numbers(each, kind).astype(dtype) for each in sources)
    threads.write(into, kind, (x * y) >> dtype(FORMATS[kind].bits))


def dot_of_bytes(threads: Threads, instruction: Instruction) -> None:
    """`dp4a`: add the products of four bytes."""
    into, *sources = instruction.operands
    kinds = ["i1" if kind == "s32" else "u1" for kind in instruction.parts[1:]]
    x, y = (
        threads.every(each, "b32").view(kind).reshape(-1, 4).astype(np.int32)
        for each, kind in zip(sources[:2], kinds, strict=True)
    )
    threads.write(into, "s32", (x * y).sum(1, dtype=np.int32) + threads.numbers(sources[2], "s32"))


def compare(threads: Threads, instruction: Instruction) -> None:
    """`setp`: the result may be combined with a predicate."""
    _, how, *combined, kind = (part for part in instruction.parts if part != "ftz")
    into, x, y, *predicate = instruction.operands
    unsigned = kind.replace("b", "u")
    found = COMPARE[how](threads.numbers(x, unsigned), threads.numbers(y, unsigned))
    if combined:
        found = COMPUTE[combined[0]](found, threads.raw(predicate[0], "pred"))
    threads.write_raw(into, found)


def convert(threads: Threads, instruction: Instruction) -> None:
    *modifiers, into_kind, kind = instruction.parts[1:]
    unknown = set(modifiers) - {"rn", "ftz", *TO_INTEGER}
    assert not unknown, unknown
    into, *sources = instruction.operands
    if into_kind in ("f16x2", "bf16x2"):  # the first operand becomes the upper half
        numbers = np.stack(
            np.broadcast_arrays(*(threads.numbers(each, kind) for each in reversed(sources))), 1
        )
    else:
        numbers = _flushed(threads.numbers(sources[0], kind), instruction)
    to = FORMATS[into_kind]
    if numbers.dtype.kind == "f" and not to.is_float:
        rounded = next(TO_INTEGER[each] for each in modifiers if each in TO_INTEGER)(
            numbers.astype(np.float64)
        )
        limits = np.iinfo(f"{'i' if to.is_signed else 'u'}{to.bits // 8}")
        numbers = np.clip(np.nan_to_num(rounded), limits.min, limits.max).astype(limits.dtype)
    elif not to.is_float:
        numbers = numbers.astype(f"i{to.bits // 8}" if to.is_signed else f"u{to.bits // 8}")
    threads.write(into, into_kind, numbers)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys((*COMPUTE, *MIXED), compute),
    **dict.fromkeys(("mul.wide", "mad.wide"), multiply_wide),
    "mul.hi": multiply_high,
    "dp4a": dot_of_bytes,
    **{f"setp.{how}{also}": compare for how in COMPARE for also in ("", ".and", ".or", ".xor")},
    **dict.fromkeys(("cvt", *(f"cvt.{how}" for how in TO_INTEGER)), convert),
}
