"""Instructions that move data: between registers, lanes and memories."""

from typing import NamedTuple

import numpy as np

from .memory import KernelError
from .numbers import FORMATS, Array, resized
from .parse import Address, Instruction, Operand
from .threads import WARP, Handler, Threads

# Hints about caches, which change no result.
HINTS = {"ca", "cg", "cs", "wb", "L1::evict_last", "L1::evict_first", "L1::no_allocate"}


class Copy(NamedTuple):
    """An asynchronous copy of some threads into shared memory."""

    threads: Array
    groups: Array  # its number among the thread's groups
    places: Array  # [threads, size]
    content: Array  # [threads, size]


def _listed(operand: Operand) -> tuple[str, ...]:
    assert not isinstance(operand, Address), operand
    return (operand,) if isinstance(operand, str) else operand


def move(threads: Threads, instruction: Instruction) -> None:
    """Copy a register, or compose it from parts, or take it apart; the first part is the lowest."""
    _, kind = instruction.parts
    into, source = (_listed(each) for each in instruction.operands)
    if len(source) > 1:
        part = FORMATS[kind].bits // len(source)
        bits = np.stack([threads.every(each, f"b{part}") for each in source], 1)
        threads.write_raw(into[0], bits.view(f"u{FORMATS[kind].bits // 8}")[:, 0])
    elif len(into) > 1:
        part = FORMATS[kind].bits // len(into)
        parts = threads.every(source[0], kind).view(f"u{part // 8}").reshape(-1, len(into)).copy()
        for place, name in enumerate(into):
            threads.write_raw(name, parts[:, place])
    else:
        threads.write_raw(into[0], threads.raw(source[0], kind))


def load(threads: Threads, instruction: Instruction) -> None:
    _, space, *modifiers, kind = instruction.parts
    into, source = instruction.operands
    names, size = _listed(into), FORMATS[kind].bits // 8
    _check_modifiers(modifiers, len(names))
    assert isinstance(source, Address)
    if space == "param":
        content = np.frombuffer(threads.parameters[source.base], np.uint8)[source.offset :][
            None, : size * len(names)
        ]
    elif space == "shared":
        addresses = threads.addresses(source, "u32")
        content = threads.shared.load(*_own(threads), addresses, size * len(names))
    else:
        content = threads.memory.load(threads.addresses(source, "u64"), size * len(names))
    if space != "param":
        every = np.zeros((threads.count, content.shape[1]), np.uint8)
        every[threads.mask] = content
        content = every
    for place, name in enumerate(names):
        bits = np.ascontiguousarray(content[:, place * size : (place + 1) * size]).view(f"u{size}")[:, 0]
        threads.write_raw(name, bits, is_signed=FORMATS[kind].is_signed)


def store(threads: Threads, instruction: Instruction) -> None:
    _, space, *modifiers, kind = instruction.parts
    into, source = instruction.operands
    names = _listed(source)
    _check_modifiers(modifiers, len(names))
    columns = [np.broadcast_to(threads.raw(name, kind), threads.count)[threads.mask] for name in names]
    content = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
    if space == "shared":
        threads.shared.store(*_own(threads), threads.addresses(into, "u32"), content)
    else:
        assert space == "global", space
        threads.memory.store(threads.addresses(into, "u64"), content)


def _own(threads: Threads) -> tuple[Array, Array]:
    """Return the programs, and their warps, of the masked threads."""
    return threads.program[threads.mask], threads.warp[threads.mask]


def _check_modifiers(modifiers: list[str], count: int) -> None:
    unknown = set(modifiers) - HINTS - {f"v{count}"}
    assert not unknown, unknown


def copy_asynchronously(threads: Threads, instruction: Instruction) -> None:
    """Begin a copy; the last operand says how many bytes are read, and zeros follow."""
    into, source, text, *given = instruction.operands
    size = int(str(text), 0)
    mask, lanes = threads.mask, threads.places[threads.mask]
    programs, warps = _own(threads)
    places = threads.shared.places(programs, threads.addresses(into, "u32"), size)
    length = threads.every(given[0], "u32")[mask].astype(np.int64) if given else np.full(len(lanes), size)
    addresses, content = threads.addresses(source, "u64"), np.zeros((len(lanes), size), np.uint8)
    if not np.isin(length, (0, size)).all():
        raise NotImplementedError("an asynchronous copy of a part")
    content[length > 0] = threads.memory.load(addresses[length > 0], size)
    threads.shared.await_copy(places, warps)
    threads.pending.append(Copy(lanes, threads.groups[lanes], places, content))


def commit_group(threads: Threads, instruction: Instruction) -> None:
    threads.groups[threads.mask] += 1


def wait_group(threads: Threads, instruction: Instruction) -> None:
    """End a thread's copies, but for those of its latest groups."""
    _end_copies(threads, int(str(instruction.operands[0]), 0))


def wait_all(threads: Threads, instruction: Instruction) -> None:
    threads.groups[threads.mask] += 1
    _end_copies(threads, 0)


def _end_copies(threads: Threads, kept: int) -> None:
    left: list[Copy] = []
    for copy in threads.pending:
        ends = threads.mask[copy.threads] & (copy.groups < threads.groups[copy.threads] - kept)
        if ends.any():
            threads.shared.put(copy.places[ends], threads.warp[copy.threads[ends]], copy.content[ends])
        if not ends.all():
            left.append(Copy(*(each[~ends] for each in copy)))
    threads.pending = left


def shuffle(threads: Threads, instruction: Instruction) -> None:
    """Read a register of another lane; the fourth operand limits lanes to a part of the warp."""
    how = instruction.parts[2]
    into, source, by, limits, members = instruction.operands
    warps = threads.whole_warps()
    assert (threads.raw(members, "b32") == 0xFFFFFFFF).all(), "a shuffle of some lanes"
    given = resized(threads.by_warp(limits, warps), 64).astype(np.int64)
    steps = threads.by_warp(by, warps).astype(np.int64)
    lane = np.arange(WARP)
    segment, clamp = given >> 8 & 31, given & 31
    first = lane & segment
    last = first | (clamp & ~segment)
    if how == "bfly":
        found = lane ^ steps
    elif how == "idx":
        found = first | (steps & 31 & ~segment)
    else:
        found = lane - steps if how == "up" else lane + steps
    is_in = found >= last if how == "up" else found <= last
    values = np.take_along_axis(threads.by_warp(source, warps), np.where(is_in, found, lane) & 31, 1)
    name, _, predicate = str(into).partition("|")
    threads.write_by_warp(name, warps, values)
    if predicate:
        threads.write_by_warp(predicate, warps, is_in)


def reduce(threads: Threads, instruction: Instruction) -> None:
    """`redux`: reduce a register over a warp."""
    how, kind = instruction.parts[2:]
    into, source, members = instruction.operands
    warps = threads.whole_warps()
    assert (threads.raw(members, "b32") == 0xFFFFFFFF).all(), "a reduction of some lanes"
    names: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    names |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    numbers = FORMATS[kind].numbers(threads.by_warp(source, warps))
    found = names[how].reduce(numbers, axis=1, dtype=numbers.dtype, keepdims=True)
    threads.write_by_warp(into, warps, np.broadcast_to(found, numbers.shape).view(np.uint32))


def check_warp(threads: Threads, instruction: Instruction) -> None:
    threads.whole_warps()


def fail(threads: Threads, instruction: Instruction) -> None:
    raise KernelError("the kernel traps")


HANDLERS: dict[str, Handler] = {
    "mov": move,
    **dict.fromkeys(("ld.global", "ld.shared", "ld.param"), load),
    **dict.fromkeys(("st.global", "st.shared"), store),
    **dict.fromkeys((f"cp.async.{how}.shared.global" for how in ("ca", "cg")), copy_asynchronously),
    "cp.async.commit_group": commit_group,
    "cp.async.wait_group": wait_group,
    "cp.async.wait_all": wait_all,
    **dict.fromkeys((f"shfl.{how}" for how in ("bfly", "idx", "up", "down")), shuffle),
    **dict.fromkeys((f"redux.{how}" for how in ("add", "min", "max", "and", "or", "xor")), reduce),
    "bar.warp": check_warp,
    "trap": fail,
}
