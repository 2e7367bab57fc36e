"""A ring of buffers that are filled and used in order."""

from neo_desktop.engine.execute.lane import Signal


class Ring:
    """A ring of slots for prefetched data."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[Signal, ...]] = [()] * size  # per slot: signals to wait for
        self._filled = self._given_back = 0

    @property
    def has_room(self) -> bool:
        """True if a slot can be filled after its last use has ended."""
        return self._filled < self._given_back + len(self._free)

    def fill(self) -> tuple[int, tuple[Signal, ...]]:
        """Return the next slot, and the signals to wait for before filling it."""
        slot = self._filled % len(self._free)
        self._filled += 1
        return slot, self._free[slot]

    def give_back(self, used: Signal) -> None:
        """Release the oldest filled slot; `used` signals the end of its use."""
        self._free[self._given_back % len(self._free)] = (used,)
        self._given_back += 1
