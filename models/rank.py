"""Which of the processes a process is among which a model is divided; see `ranks`."""

from dataclasses import dataclass

# Inner numbers are divided by the largest of these that leaves each rank about as many: so quantised columns
# consist of whole blocks.
_UNITS = (256, 64, 32, 16, 2, 1)
_FAIR = 16  # units of each rank, at least: the largest part is hardly larger than the mean


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many ranks."""

    number: int = 0
    count: int = 1

    def part(self, size: int) -> slice:
        """Return its part of so many things; parts differ by one at most."""
        return slice(size * self.number // self.count, size * (self.number + 1) // self.count)

    def kv_part(self, heads: int) -> slice:
        """Return its part of so many key-value heads; of fewer than there are ranks, some have the same."""
        first = heads * self.number // self.count
        return slice(first, max(heads * (self.number + 1) // self.count, first + 1))

    def inner_part(self, size: int, least_unit: int = 1) -> slice:
        """Return its part of the inner numbers of a feed-forward network, in multiples of a unit."""
        units = [unit for unit in _UNITS if size % unit == 0 and unit % least_unit == 0]
        unit = next((unit for unit in units if size // unit >= _FAIR * self.count), units[-1])
        part = self.part(size // unit)
        return slice(part.start * unit, part.stop * unit)


ALONE = Rank()
