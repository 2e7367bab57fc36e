"""Executes kernels: some programs at once, in a random order of programs and warps."""

from itertools import product

import numpy as np

from . import arithmetic, matrices, transfers
from .memory import GlobalMemory, KernelError
from .numbers import Array
from .parse import Instruction, Kernel
from .threads import WARP, Handler, Threads

THREADS_AT_ONCE = 2048
MOST_BLOCKS = 200_000  # of straight code per execution; more would be an endless loop
# These look at the rest of their instruction's name themselves.
CHECKED: dict[str, Handler] = transfers.HANDLERS | matrices.HANDLERS
FLOW = ("bra", "ret", "exit", "bar.sync")


class UnsupportedError(AssertionError):
    """The interpreter does not know an instruction."""


def handler_of(instruction: Instruction) -> Handler:
    """Find an instruction in the tables."""
    name, _ = arithmetic.split(instruction)
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    found = arithmetic.HANDLERS.get(name) or next(
        (CHECKED[each] for each in beginnings if each in CHECKED), None
    )
    if found is None:
        raise UnsupportedError(f"unknown instruction: {instruction}")
    return found


def run(
    kernel: Kernel,
    grid: tuple[int, int, int],
    parameters: dict[str, bytes],
    memory: GlobalMemory,
    shared_bytes: int,
    seed: int = 0,
) -> set[int]:
    """Execute all programs of a grid; return the places of the instructions that threads executed.

    Raises:
        KernelError: the kernel is wrong.
        UnsupportedError: the interpreter does not know an instruction.
    """
    blocks = _Blocks(kernel)
    random = np.random.default_rng(seed)
    programs = np.array(list(product(*map(range, grid))))
    random.shuffle(programs)
    at_once = max(1, THREADS_AT_ONCE // kernel.num_threads)
    for first in range(0, len(programs), at_once):
        some = programs[first : first + at_once]
        threads = Threads(kernel, parameters, memory, shared_bytes, some, grid)
        _run_some(threads, blocks, random)
    return blocks.executed


class _Blocks:
    """Starts of a kernel's straight code, handlers of its instructions, and places that were executed."""

    def __init__(self, kernel: Kernel) -> None:
        targets = {str(i.operands[0]) for i in kernel.code if i.parts[0] == "bra"}
        self.starts = {kernel.labels[name] for name in targets}
        is_flow = [".".join(i.parts).startswith(FLOW) for i in kernel.code]
        self.handlers = [
            None if flow else handler_of(i) for i, flow in zip(kernel.code, is_flow, strict=True)
        ]
        self.executed = set[int]()


def _run_some(threads: Threads, blocks: _Blocks, random: np.random.Generator) -> None:
    """Execute programs to their ends.

    A random half of the warps runs first between two barriers. Threads that are behind others execute first.
    """
    count = threads.count
    place, ended, waiting = np.zeros(count, np.int64), np.zeros(count, bool), np.zeros(count, bool)
    is_late = _late_warps(count, random)
    with np.errstate(all="ignore"):
        for _ in range(MOST_BLOCKS):
            can_run = ~(ended | waiting)
            if not can_run.any():
                if not waiting.any():
                    return
                threads.shared.pass_barrier(np.unique(threads.program[waiting]))
                waiting[:] = False
                is_late = _late_warps(count, random)
                continue
            early = can_run & ~is_late
            chosen = early if early.any() else can_run
            current = place[chosen].min()
            _run_block(threads, blocks, chosen & (place == current), place, ended, waiting)
    raise KernelError(f"{threads.kernel.name} does not end")


def _late_warps(count: int, random: np.random.Generator) -> Array:
    return np.repeat(random.random(count // WARP) < 0.5, WARP)


def _run_block(
    threads: Threads, blocks: _Blocks, active: Array, place: Array, ended: Array, waiting: Array
) -> None:
    """Execute straight code until threads part or meet others; advance their places."""
    current = int(place[active][0])
    code = threads.kernel.code
    while True:
        if current == len(code):
            ended |= active
            return
        instruction, handler = code[current], blocks.handlers[current]
        mask = active
        if instruction.guard is not None:
            mask = active & (threads.raw(instruction.guard, "pred") ^ instruction.negated)
        threads.mask = mask
        is_executed = instruction.guard is None or bool(mask.any())
        if is_executed:
            blocks.executed.add(current)
        current += 1
        if handler is not None:
            if is_executed:
                _execute(threads, handler, instruction)
        else:
            place[active] = current
            if instruction.parts[0] == "bra":
                place[mask] = threads.kernel.labels[str(instruction.operands[0])]
            elif instruction.parts[0] == "bar":
                assert instruction.operands == ("0",), instruction
                threads.whole_warps()
                waiting |= mask
            else:
                ended |= mask
            return
        if current in blocks.starts:
            place[active] = current
            return


def _execute(threads: Threads, handler: Handler, instruction: Instruction) -> None:
    try:
        handler(threads, instruction)
    except KernelError as error:
        raise KernelError(f"{threads.kernel.name}: {error}: {instruction}") from error
    except Exception as error:
        raise UnsupportedError(f"{threads.kernel.name}: {instruction}: {error!r}") from error
