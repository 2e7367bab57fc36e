"""Where a request's KV may live."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar


class Side(Enum):
    """The two sides of the bus: each has memory, and can compute attention over what lies there."""

    DEVICE = auto()  # the GPU; where there is none, the CPU stands in for it
    HOST = auto()  # host memory and the native CPU kernels


@dataclass(frozen=True, slots=True)
class Place:
    """A memory that can hold a request's KV, and who computes the decode attention over it.

    Compare places by value: they are sent to other processes.
    """

    name: str
    memory: Side
    attends: Side
    label: str  # what metrics and reports call it

    DEVICE: ClassVar["Place"]  # the GPU-cache, imitated in host memory where there is no GPU
    HOST: ClassVar["Place"]  # the CPU-cache

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """What users call it: "GPU-cache"."""
        return f"{self.label.upper()}-cache"

    @property
    def host_attends(self) -> bool:
        """Whether its decodes cross the bus: the CPU attends for them."""
        return self.attends is Side.HOST

    @property
    def in_host_memory(self) -> bool:
        """Whether its KV lies in host memory, even where there is a GPU."""
        return self.memory is Side.HOST


Place.DEVICE = Place("device", memory=Side.DEVICE, attends=Side.DEVICE, label="gpu")
Place.HOST = Place("host", memory=Side.HOST, attends=Side.HOST, label="cpu")
PLACES = (Place.DEVICE, Place.HOST)  # those that set-up knows how to make
