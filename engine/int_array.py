"""Integers that are appended one by one and read as one array."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

IntView = NDArray[np.int32]  # read-only


class IntArray:
    """A sequence of int32 that grows at its end and never changes what is there.

    So a view of it is fixed, too: what is appended later lies behind its end, or in a larger array.
    """

    __slots__ = ("_memory", "_readable", "_size")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._size = 0
        self._allocate(np.empty(16, dtype=np.int32))
        self.extend(numbers)

    def __len__(self) -> int:
        return self._size

    def append(self, number: int) -> None:
        """Add one number."""
        if self._size == len(self._memory):
            self._make_room(1)
        self._memory[self._size] = number
        self._size += 1

    def extend(self, numbers: Iterable[int]) -> None:
        """Add some numbers."""
        added = np.fromiter(numbers, dtype=np.int32)
        if self._size + len(added) > len(self._memory):
            self._make_room(len(added))
        self._memory[self._size : self._size + len(added)] = added
        self._size += len(added)

    def view(self) -> IntView:
        """Return all numbers there are now, without copying them."""
        return self._readable[: self._size]

    def _make_room(self, num_added: int) -> None:
        memory = np.empty(2 * (self._size + num_added), dtype=np.int32)
        memory[: self._size] = self._memory[: self._size]
        self._allocate(memory)

    def _allocate(self, memory: NDArray[np.int32]) -> None:
        self._memory = memory
        self._readable = memory.view()
        self._readable.flags.writeable = False
