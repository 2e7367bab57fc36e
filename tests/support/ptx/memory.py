"""Global memory, the process's own, and shared memory; every access is checked."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .numbers import Array


class KernelError(AssertionError):
    """The kernel did what a GPU would not survive, or not always compute alike."""


class Region(NamedTuple):
    """Bytes that a kernel may use."""

    start: int
    size: int
    name: str


class _Bytes:
    """The interface by which numpy sees memory at an address."""

    def __init__(self, start: int, count: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (count,),
            "typestr": f"|V{size}",
            "version": 3,
        }


def check_alignment(addresses: Array, size: int) -> None:
    if (addresses % size).any():
        raise KernelError(f"an address is no multiple of {size}: {_hex(addresses[addresses % size != 0][0])}")


class GlobalMemory:
    """The memory of some tensors."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(set(regions))
        self._starts = np.array([each.start for each in self._regions], np.int64)
        self._ends = np.array([each.start + each.size for each in self._regions], np.int64)
        self._low = self._regions[0].start // 16 * 16 if self._regions else 0
        self._views: dict[int, Array] = {}

    def load(self, addresses: Array, size: int) -> Array:
        """Return bytes, [addresses, size] uint8."""
        found = self._view(size)[self._items(addresses, size)]
        return found.view(np.uint8).reshape(-1, size)

    def store(self, addresses: Array, content: Array) -> None:
        """Store bytes, [addresses, size] uint8."""
        size = content.shape[1]
        self._view(size)[self._items(addresses, size)] = np.ascontiguousarray(content).view(f"V{size}")[:, 0]

    def check(self, addresses: Array, size: int) -> None:
        check_alignment(addresses, size)
        if not len(addresses):
            return
        if not self._regions:
            raise KernelError("global memory is used without a tensor")
        region = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (region < 0) | (addresses + size > self._ends[region])
        if outside.any():
            raise KernelError(f"{size} bytes {self._described(int(addresses[outside][0]))}")

    def _items(self, addresses: Array, size: int) -> Array:
        self.check(addresses, size)
        return (addresses - self._low) // size

    def _view(self, size: int) -> Array:
        """Return all memory from the first to the last tensor; only checked addresses may be used."""
        if size not in self._views:
            count = -(-(int(self._ends.max(initial=0)) - self._low) // size)
            self._views[size] = np.asarray(_Bytes(self._low, count, size))
        return self._views[size]

    def _described(self, address: int) -> str:
        near = min(self._regions, key=lambda r: min(abs(address - r.start), abs(address - r.start - r.size)))
        return f"at {address - near.start:+d} of {near.name}, which has {near.size} bytes"


class SharedMemory:
    """Shared memory of several programs.

    Between two barriers, a warp may not read what another one wrote, nor overwrite what another one read or
    wrote. But several warps may write the same value. Bytes of an unfinished copy are not used.

    Args:
        size: bytes per program.
        num_warps: per program.
    """

    def __init__(self, num_programs: int, size: int, num_warps: int) -> None:
        self._size, self._pitch, self._num_warps = size, -(-max(size, 1) // 16) * 16, num_warps
        count = num_programs * self._pitch
        self._content = np.full(count, 0xFF, np.uint8)
        self._is_known = np.zeros(count, bool)
        self._is_awaited = np.zeros(count, bool)
        self._readers, self._writers = np.zeros((2, count), np.uint32)  # bits of warps since the last barrier

    def load(self, programs: Array, warps: Array, addresses: Array, size: int) -> Array:
        """Return bytes, [addresses, size] uint8; `warps`: numbers in the program."""
        places = self.places(programs, addresses, size)
        if not self._is_known[places].all():
            raise KernelError("shared memory is read before it was written")
        self._check_awaited(places)
        if self._others(self._writers, places, warps).any():
            raise KernelError("shared memory is read that another warp wrote, without a barrier between")
        self._mark(self._readers, places, warps)
        return self._content[places]

    def store(self, programs: Array, warps: Array, addresses: Array, content: Array) -> None:
        """Store bytes, [addresses, size] uint8."""
        places = self.places(programs, addresses, content.shape[1])
        self._check_awaited(places)
        self._check_overwritten(places, warps, content)
        self.put(places, warps, content)

    def await_copy(self, places: Array, warps: Array) -> None:
        """Begin an asynchronous copy into these places."""
        self._check_awaited(places)
        self._check_overwritten(places, warps, None)
        self._is_awaited[places] = True

    def put(self, places: Array, warps: Array, content: Array) -> None:
        """Write content, also of an asynchronous copy, which thereby ends."""
        self._content[places] = content
        if (self._content[places] != content).any():
            raise KernelError("threads write different values to the same shared memory")
        self._is_known[places], self._is_awaited[places] = True, False
        self._mark(self._writers, places, warps)

    def pass_barrier(self, programs: Array) -> None:
        """Order what came before a barrier of these programs before what comes after."""
        for marks in (self._readers, self._writers):
            marks.reshape(-1, self._pitch)[programs] = 0

    def places(self, programs: Array, addresses: Array, size: int) -> Array:
        """Return the places of bytes, [addresses, size]."""
        check_alignment(addresses, size)
        if len(addresses) and not 0 <= addresses.min() <= addresses.max() <= self._size - size:
            raise KernelError(f"{size} bytes at {addresses.max()} of {self._size} bytes of shared memory")
        return (programs * self._pitch + addresses)[:, None] + np.arange(size)

    def _check_awaited(self, places: Array) -> None:
        if self._is_awaited[places].any():
            raise KernelError("shared memory is used before the asynchronous copy into it was awaited")

    def _check_overwritten(self, places: Array, warps: Array, content: Array | None) -> None:
        if self._others(self._readers, places, warps).any():
            raise KernelError("shared memory is overwritten that another warp may still read")
        written = self._others(self._writers, places, warps)
        if content is not None:
            written &= self._content[places] != content
        if written.any():
            raise KernelError("warps write different values to the same shared memory without a barrier")

    def _others(self, marks: Array, places: Array, warps: Array) -> Array:
        """Return where warps other than the own one left a mark."""
        found: Array = (marks[places] & ~(np.uint32(1) << warps.astype(np.uint32))[:, None]) != 0
        return found

    def _mark(self, marks: Array, places: Array, warps: Array) -> None:
        for warp in range(self._num_warps):
            own = places[warps == warp]
            marks[own] |= np.uint32(1 << warp)


def _hex(address: int) -> str:
    return f"{address:#x}"
