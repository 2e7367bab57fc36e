"""Instructions of whole warps that move and multiply matrices.

A register of an 8 x 8 matrix holds one lane's two neighbouring 16-bit numbers: lane 4 * row + column / 2.
"""

import re

import numpy as np

from .memory import check_alignment
from .numbers import FORMATS, Array
from .parse import Instruction, Operand
from .threads import WARP, Handler, Threads
from .transfers import _listed

ROW, QUARTER = np.divmod(np.arange(WARP), 4)


def _rows(
    threads: Threads, instruction: Instruction, operand: Operand, count: int
) -> tuple[Array, Array, Array]:
    """Return warps, and the rows' programs and addresses in shared memory, [warps, matrices, 8].

    Lanes 0 to 7 give the addresses of the first matrix's rows, 8 to 15 those of the second, and so on.
    """
    warps = threads.whole_warps()
    addresses = np.zeros(threads.count, np.int64)
    addresses[threads.mask] = threads.addresses(operand, "u32")
    rows = addresses.reshape(-1, WARP)[warps, : 8 * count]
    check_alignment(rows.ravel(), 16)
    programs = np.broadcast_to(threads.program[warps * WARP][:, None], rows.shape)
    return warps, programs, rows


def _count(instruction: Instruction) -> tuple[int, bool]:
    assert instruction.parts[:4] == (instruction.parts[0], "sync", "aligned", "m8n8"), instruction
    assert instruction.parts[-2:] == ("shared", "b16"), instruction
    return int(instruction.parts[4][1:]), "trans" in instruction.parts


def load_matrices(threads: Threads, instruction: Instruction) -> None:
    into, source = instruction.operands
    count, transposed = _count(instruction)
    warps, programs, rows = _rows(threads, instruction, source, count)
    of_program = np.broadcast_to(threads.warp[warps * WARP][:, None], rows.shape)
    content = threads.shared.load(programs.ravel(), of_program.ravel(), rows.ravel(), 16)
    matrices = content.view(np.uint16).reshape(len(warps), count, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    registers = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, WARP)
    for place, name in enumerate(_listed(into)):
        threads.write_by_warp(name, warps, registers[:, place])


def store_matrices(threads: Threads, instruction: Instruction) -> None:
    into, source = instruction.operands
    count, transposed = _count(instruction)
    warps, programs, rows = _rows(threads, instruction, into, count)
    registers = np.stack([threads.by_warp(name, warps) for name in _listed(source)], 1)
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(len(warps), count, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    content = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
    of_program = np.broadcast_to(threads.warp[warps * WARP][:, None], rows.shape)
    threads.shared.store(programs.ravel(), of_program.ravel(), rows.ravel(), content)


def multiply_matrices(threads: Threads, instruction: Instruction) -> None:
    """Compute d = a b + c for a [16, k] or [8, k], b [k, 8] and float32 or int32 c, by one sum in float64.

    A lane's registers hold neighbouring numbers of a's rows and b's columns.
    """
    shape, *layouts, result, of_a, of_b, of_c = instruction.parts[3:]
    assert (layouts, result) == (["row", "col"], of_c), instruction
    assert result in ("f32", "s32"), instruction
    rows, _, k = (int(size) for size in re.split("[mnk]", shape)[1:])
    assert shape in (f"m16n8k{k}", "m8n8k16"), instruction
    into, *sources = (_listed(each) for each in instruction.operands)
    warps = threads.whole_warps()
    registers = [np.stack([threads.by_warp(name, warps) for name in names], 1) for names in sources]
    a = np.zeros((len(warps), rows, k))
    b = np.zeros((len(warps), k, 8))
    c = FORMATS[result].numbers(registers[2])
    for place in range(registers[0].shape[1]):
        numbers = _unpacked(registers[0][:, place], of_a)
        for i in range(numbers.shape[2]):
            columns = numbers.shape[2] * (QUARTER + 4 * (place // 2)) + i
            a[:, ROW + 8 * (place % 2), columns] = numbers[..., i]
    for place in range(registers[1].shape[1]):
        numbers = _unpacked(registers[1][:, place], of_b)
        for i in range(numbers.shape[2]):
            b[:, numbers.shape[2] * (QUARTER + 4 * place) + i, ROW] = numbers[..., i]
    product = a @ b
    for place, name in enumerate(into):
        found = product[:, ROW + 8 * (place // 2), 2 * QUARTER + place % 2] + c[:, place]
        threads.write_by_warp(name, warps, FORMATS[result].raw(found.astype(c.dtype)))


def _unpacked(registers: Array, kind: str) -> Array:
    """Return the numbers in registers, [warps, 32, numbers per register] float64."""
    if kind == "tf32":  # float32 without the lowest bits
        return (registers & np.uint32(0xFFFFE000)).view(np.float32)[..., None].astype(np.float64)
    bits = FORMATS[kind].bits
    numbers = FORMATS[kind].numbers(np.ascontiguousarray(registers).view(f"u{bits // 8}"))
    return numbers.reshape(*registers.shape, 32 // bits).astype(np.float64)


HANDLERS: dict[str, Handler] = {
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
    "mma": multiply_matrices,
}
