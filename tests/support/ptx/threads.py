"""The threads of some programs: their registers, and a mask of the executing ones."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import GlobalMemory, KernelError, SharedMemory
from .numbers import FORMATS, UNSIGNED, Array, immediate, resized
from .parse import Address, Kernel, Operand

WARP = 32
SHARED_NAME = "global_smem"  # Triton's name for all shared memory


class Threads:
    """State of some programs of one launch; all arrays have an element per thread.

    Args:
        parameters: name → bytes.
        programs: [programs, 3]: their coordinates in the grid.
        grid: its size in three dimensions.
    """

    def __init__(
        self,
        kernel: Kernel,
        parameters: dict[str, bytes],
        memory: GlobalMemory,
        shared_bytes: int,
        programs: Array,
        grid: tuple[int, int, int],
    ) -> None:
        self.kernel, self.parameters, self.memory = kernel, parameters, memory
        num_warps = -(-kernel.num_threads // WARP)
        self.shared = SharedMemory(len(programs), shared_bytes, num_warps)
        self.count = len(programs) * kernel.num_threads
        self.places = np.arange(self.count)
        self.program, self.thread = np.divmod(self.places, kernel.num_threads)
        self.warp, self.lane = np.divmod(self.thread, WARP)
        self.mask = np.ones(self.count, bool)  # threads that execute the current instruction
        self.pending: list[Any] = []  # asynchronous copies
        self.groups = np.zeros(self.count, np.int64)  # of asynchronous copies that each thread committed
        self._registers: dict[str, Array] = {}
        self._special = {"%tid.x": self.thread, "%laneid": self.lane, "%tid.y": self.places * 0}
        self._special |= {"%ntid.x": np.full(self.count, kernel.num_threads), "%tid.z": self.places * 0}
        for place, axis in enumerate("xyz"):
            self._special[f"%ctaid.{axis}"] = programs[self.program, place]
            self._special[f"%nctaid.{axis}"] = np.full(self.count, grid[place])
        self._special = {name: each.astype(np.uint32) for name, each in self._special.items()}

    def raw(self, operand: Operand, kind: str) -> Array:
        """Return an operand's bits, [threads] or [1]."""
        assert isinstance(operand, str), operand
        if operand in self._registers or operand[0] == "%" or operand in self.kernel.widths:
            bits = self._special[operand] if operand in self._special else self.register(operand)
            return resized(bits, FORMATS[kind].bits)
        if operand == SHARED_NAME:
            return np.zeros(1, UNSIGNED[FORMATS[kind].bits])
        return immediate(operand, kind)

    def numbers(self, operand: Operand, kind: str) -> Array:
        """Return an operand as numbers, [threads] or [1]; of packed types […, 2]."""
        return FORMATS[kind].numbers(self.raw(operand, kind))

    def every(self, operand: Operand, kind: str) -> Array:
        """Return an operand's bits, [threads]."""
        return np.ascontiguousarray(np.broadcast_to(self.raw(operand, kind), self.count))

    def write(self, operand: Operand, kind: str, numbers: Array) -> None:
        self.write_raw(operand, FORMATS[kind].raw(numbers), is_signed=FORMATS[kind].is_signed)

    def write_raw(self, operand: Operand, raw: Array, *, is_signed: bool = False) -> None:
        """Write bits into a register, which may be wider, of the threads in the mask."""
        assert isinstance(operand, str), operand
        if operand == "_":
            return
        register = self.register(operand)
        bits = 1 if register.dtype == bool else 8 * register.itemsize
        np.copyto(register, resized(raw, bits, is_signed=is_signed), where=self.mask)

    def register(self, name: str) -> Array:
        """Return a register, at first of bits that are no float, no likely address and no small number."""
        if name not in self._registers:
            width = self.kernel.width(name)
            fill = True if width == 1 else 2**width - 1
            self._registers[name] = np.full(self.count, fill, UNSIGNED[width])
        return self._registers[name]

    def addresses(self, operand: Operand, kind: str) -> Array:
        """Return the addresses of the masked threads, as int64."""
        assert isinstance(operand, Address), operand
        found = self.every(operand.base, kind).astype(np.int64)
        return found[self.mask] + operand.offset

    def whole_warps(self) -> Array:
        """Return the numbers of executing warps, across programs; raise KernelError for a part of a warp."""
        by_warp = self.mask.reshape(-1, WARP)
        found = by_warp.any(1)
        if (by_warp[found] == 0).any():
            raise KernelError("a part of a warp executes an instruction of whole warps")
        return np.flatnonzero(found)

    def by_warp(self, operand: Operand, warps: Array) -> Array:
        """Return a 32-bit operand of whole warps, [warps, 32]."""
        return self.every(operand, "b32").reshape(-1, WARP)[warps]

    def write_by_warp(self, operand: Operand, warps: Array, raw: Array) -> None:
        """Write bits of whole warps, [warps, 32]."""
        found = np.zeros((self.count // WARP, WARP), raw.dtype)
        found[warps] = raw
        self.write_raw(operand, found.ravel())


Handler = Callable[[Threads, Any], None]
