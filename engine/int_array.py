"""Integers appended one by one and read as one array."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

IntView = NDArray[np.int32]  # read-only


class IntArray:
    """A growing sequence of int32 whose elements never change.

    Views therefore never change: later elements are stored after their end, or in a larger array.
    """

    __slots__ = ("_memory", "_size", "_view")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._memory = np.fromiter(numbers, dtype=np.int32)
        self._size = len(self._memory)
        self._view = _read_only(self._memory)

    def __len__(self) -> int:
        return self._size

    def append(self, number: int) -> None:
        if self._size == len(self._memory):
            self._make_room(1)
        self._memory[self._size] = number
        self._size += 1

    def extend(self, numbers: Iterable[int]) -> None:
        added = np.fromiter(numbers, dtype=np.int32)
        if self._size + len(added) > len(self._memory):
            self._make_room(len(added))
        self._memory[self._size : self._size + len(added)] = added
        self._size += len(added)

    def view(self) -> IntView:
        """Return all current numbers without a copy."""
        if len(self._view) < self._size:
            self._view = _read_only(self._memory[: self._size])
        return self._view

    def _make_room(self, num_added: int) -> None:
        memory = np.empty(2 * (self._size + num_added), dtype=np.int32)
        memory[: self._size] = self._memory[: self._size]
        self._memory = memory


def _read_only(array: NDArray[np.int32]) -> IntView:
    view = array.view()
    view.flags.writeable = False
    return view
