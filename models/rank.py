"""A process's rank in tensor parallelism; see `ranks`."""

from dataclasses import dataclass

# The intermediate size is divided in the largest of these units that keeps the ranks balanced, so that
# columns of quantised matrices consist of whole blocks.
_UNITS = (256, 64, 32, 16, 2, 1)
_FAIR = 16  # least units per rank: parts then differ little in size


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank and the number of ranks."""

    number: int = 0
    count: int = 1

    def part(self, size: int) -> slice:
        """Return the rank's part of `size` items; parts differ by at most one."""
        return slice(size * self.number // self.count, size * (self.number + 1) // self.count)

    def kv_part(self, heads: int) -> slice:
        """Return the rank's KV heads; with fewer heads than ranks, some ranks share a head."""
        first = heads * self.number // self.count
        return slice(first, max(heads * (self.number + 1) // self.count, first + 1))

    def inner_part(self, size: int, least_unit: int = 1) -> slice:
        """Return the rank's part of the intermediate size, in multiples of a unit."""
        units = [unit for unit in _UNITS if size % unit == 0 and unit % least_unit == 0]
        unit = next((unit for unit in units if size // unit >= _FAIR * self.count), units[-1])
        part = self.part(size // unit)
        return slice(part.start * unit, part.stop * unit)


ALONE = Rank()
