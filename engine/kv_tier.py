"""KV tiers: the memories that can hold a request's KV."""

from typing import ClassVar, NamedTuple


class _KVTier(NamedTuple):
    name: str
    label: str  # name in metrics and reports
    in_host_memory: bool  # KV is in host memory between iterations, even if there is a GPU
    host_attends: bool  # decode attention runs in host memory: on the CPU or in a worker
    is_remote: bool = False  # an attention worker, reached over a network, computes it


class KVTier(_KVTier):
    """A memory that can hold a request's KV, and the processor of the decode attention over it.

    Processors are the device (the GPU, or the CPU in its place if there is none) and the host. Compare tiers
    by value: they are sent to other processes. A tuple, because schedulers often look tiers up.
    """

    __slots__ = ()

    DEVICE: ClassVar["KVTier"]  # the GPU-cache; in host memory if there is no GPU
    HOST: ClassVar["KVTier"]  # the CPU-cache
    STREAMED: ClassVar["KVTier"]  # host memory; the KV is copied to the device layer by layer

    @classmethod
    def worker(cls, number: int) -> "KVTier":
        """Return the tier of an attention worker; the first worker is number 1."""
        name = f"worker-{number}"
        return cls(name, label=name, in_host_memory=True, host_attends=True, is_remote=True)

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """Name for users: "GPU-cache"."""
        return f"cache of {self.label}" if self.is_remote else f"{self.label.upper()}-cache"

    @property
    def cpu_attends(self) -> bool:
        """True if the CPU of this computer computes the decode attention."""
        return self.host_attends and not self.is_remote

    @property
    def is_streamed(self) -> bool:
        """True if KV is copied from host memory to the device for each layer; the device attends."""
        return self.in_host_memory and not self.host_attends

    @property
    def as_attended(self) -> "KVTier":
        """The tier whose decode attention costs the same: streamed KV costs as much as the device's own."""
        return KVTier.DEVICE if self.is_streamed else self


KVTier.DEVICE = KVTier("device", label="gpu", in_host_memory=False, host_attends=False)
KVTier.HOST = KVTier("host", label="cpu", in_host_memory=True, host_attends=True)
KVTier.STREAMED = KVTier("streamed", label="swap", in_host_memory=True, host_attends=False)
MEASURED_TIERS = (KVTier.DEVICE, KVTier.HOST)  # tiers whose attention is measured separately
ALL_TIERS = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)
