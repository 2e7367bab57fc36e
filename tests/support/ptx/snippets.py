"""Short pieces of PTX, executed on numpy arrays."""

import struct

import numpy as np

from .memory import GlobalMemory, Region
from .numbers import Array
from .parse import Kernel, parse
from .run import run

REGISTERS = {2: "rs", 4: "r", 8: "rd"}  # bytes → name of registers
MODULE = """
.visible .entry snippet({parameters})
.reqntid {threads}
{{
    .reg .pred %p<99>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
    {body}
    ret;
}}
"""


def kernel_of(body: str, num_arrays: int, threads: int = 32) -> Kernel:
    """Return a kernel; the address of array n is in %rd{90 + n}, the thread's number in %r90."""
    parameters = ", ".join(f".param .u64 array_{place}" for place in range(num_arrays))
    loads = "".join(f"ld.param.b64 %rd{90 + place}, [array_{place}];\n" for place in range(num_arrays))
    body = "mov.u32 %r90, %tid.x;\n" + loads + body
    return parse(MODULE.format(parameters=parameters, threads=threads, body=body))


def execute(
    body: str, *arrays: Array, threads: int = 32, grid: int = 1, shared_bytes: int = 0, seed: int = 0
) -> None:
    """Execute a body, see `kernel_of`, on arrays; shared memory begins at 0."""
    kernel = kernel_of(body, len(arrays), threads)
    memory = GlobalMemory(
        Region(each.ctypes.data, each.nbytes, f"array {place}") for place, each in enumerate(arrays)
    )
    parameters = {f"array_{place}": struct.pack("<Q", each.ctypes.data) for place, each in enumerate(arrays)}
    run(kernel, (grid, 1, 1), parameters, memory, shared_bytes, seed)


def computed(instruction: str, *operands: Array, result: str) -> Array:
    """Return what an instruction computes from operands, [n].

    Args:
        instruction: with `{d}` for the result, and `{0}`, `{1}`, … for operands; boolean ones are predicates.
        result: dtype; bool: a predicate.
    """
    count = len(operands[0])
    body, names = "", []
    for place, each in enumerate(operands):
        size = 4 if each.dtype == bool else each.itemsize
        name = f"%{REGISTERS[size]}{place + 1}"
        body += (
            f"mad.wide.u32 %rd80, %r90, {size}, %rd{91 + place};\nld.global.b{8 * size} {name}, [%rd80];\n"
        )
        if each.dtype == bool:
            body += f"setp.ne.s32 %p{place + 1}, {name}, 0;\n"
            name = f"%p{place + 1}"
        names.append(name)
    is_predicate = result == "bool"
    size = 4 if is_predicate else np.dtype(result).itemsize
    into = f"%{REGISTERS[size]}50"
    body += instruction.format(*names, d="%p50" if is_predicate else into) + ";\n"
    if is_predicate:
        body += f"selp.b32 {into}, 1, 0, %p50;\n"
    body += f"mad.wide.u32 %rd80, %r90, {size}, %rd90;\nst.global.b{8 * size} [%rd80], {into};\n"
    out = np.zeros(count, f"u{size}")
    given = [
        each.astype(np.uint32) if each.dtype == bool else np.ascontiguousarray(each) for each in operands
    ]
    execute(body, out, *given, threads=count)
    return out.astype(bool) if is_predicate else out.view(result)
