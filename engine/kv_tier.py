"""Where a request's KV may live."""

from typing import ClassVar, NamedTuple


class _KVTier(NamedTuple):
    name: str
    label: str  # what metrics and reports call it
    in_host_memory: bool  # whether its KV lies there between iterations, even where there is a GPU
    host_attends: bool  # whether its decodes go through host memory: the CPU attends for them, or a worker
    is_remote: bool = False  # whether an attention worker does that, at the other end of a network


class KVTier(_KVTier):
    """A memory that can hold a request's KV, and what computes the decode attention over it.

    The two sides: the device (the GPU; where there is none, the CPU stands in for it), and the host. Compare
    tiers by value: they are sent to other processes. A tuple, since schedulers look up much by tier.
    """

    __slots__ = ()

    DEVICE: ClassVar["KVTier"]  # the GPU-cache, imitated in host memory where there is no GPU
    HOST: ClassVar["KVTier"]  # the CPU-cache
    STREAMED: ClassVar[
        "KVTier"
    ]  # host memory whose KV comes to the device, layer by layer, to be attended to

    @classmethod
    def worker(cls, number: int) -> "KVTier":
        """Return the memory of an attention worker, the first of which is number 1."""
        name = f"worker-{number}"
        return cls(name, label=name, in_host_memory=True, host_attends=True, is_remote=True)

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """What users call it: "GPU-cache"."""
        return f"cache of {self.label}" if self.is_remote else f"{self.label.upper()}-cache"

    @property
    def cpu_attends(self) -> bool:
        """Whether the CPU of this computer attends for its decodes."""
        return self.host_attends and not self.is_remote

    @property
    def is_streamed(self) -> bool:
        """Whether its KV comes from host memory to the device for each layer: the device attends to it."""
        return self.in_host_memory and not self.host_attends

    @property
    def as_attended(self) -> "KVTier":
        """The tier whose decode attention takes as long: swapped KV is the device's once it is there."""
        return KVTier.DEVICE if self.is_streamed else self

    @property
    def stays_on_device(self) -> bool:
        """Whether the host has no part in its decodes."""
        return not self.in_host_memory


KVTier.DEVICE = KVTier("device", label="gpu", in_host_memory=False, host_attends=False)
KVTier.HOST = KVTier("host", label="cpu", in_host_memory=True, host_attends=True)
KVTier.STREAMED = KVTier("swapped", label="swap", in_host_memory=True, host_attends=False)
MEASURED_TIERS = (KVTier.DEVICE, KVTier.HOST)  # whose attention is measured: each in its own way
ALL_TIERS = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)
