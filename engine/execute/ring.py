"""Pieces of memory that are filled and used in turn, each as soon as it is free again."""

from neo_desktop.engine.execute.lane import Signal


class Ring:
    """Slots for what comes ahead of its use.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self._free: list[tuple[Signal, ...]] = [()] * size  # when each may be filled
        self._filled = self._given_back = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot can be filled, once what uses it has ended."""
        return self._filled < self._given_back + len(self._free)

    def fill(self) -> tuple[int, tuple[Signal, ...]]:
        """Return the next slot, and what has to end before it is filled."""
        slot = self._filled % len(self._free)
        self._filled += 1
        return slot, self._free[slot]

    def give_back(self, used: Signal) -> None:
        """Take in what ends with the use of the slot that was filled first."""
        self._free[self._given_back % len(self._free)] = (used,)
        self._given_back += 1
