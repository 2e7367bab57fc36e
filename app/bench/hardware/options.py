"""What the suite measures, and how much memory and time it takes."""

from dataclasses import dataclass

from neo_desktop import native
from neo_desktop.app.bench.computer import bytes_beyond_caches

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The defaults are a thorough run.

    Raises ValueError for sizes and times that make no sense.
    """

    seconds: float = 45.0  # for all repetitions together; each measurement is made three times at least
    threads: tuple[int, ...] = ()  # of host measurements; empty: 1, 2, 4, ... and all usable cores
    # Read on the host; None: 1 GiB or four times the last-level cache, within a quarter of what is free.
    memory_bytes: int | None = None
    cpu_matrix_size: int = 2048  # rows and columns
    gpu_memory_bytes: int = GIB  # read on the GPU, within a quarter of what is free
    gpu_matrix_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    transfer_bytes: tuple[int, ...] = tuple(4 * KIB * 4**i for i in range(8))  # 4 KiB to 64 MiB
    gpu_slice: int | None = None  # multiprocessors of the GPU; None: all of them
    hand_off_bytes: tuple[int, ...] = (16 * KIB, 512 * KIB)  # about what 1 and 32 requests hand over

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds:g}; expected more than 0")
        sizes = {
            "threads": self.threads,
            "memory_bytes": () if self.memory_bytes is None else (self.memory_bytes,),
            "cpu_matrix_size": (self.cpu_matrix_size,),
            "gpu_memory_bytes": (self.gpu_memory_bytes,),
            "gpu_matrix_sizes": self.gpu_matrix_sizes,
            "transfer_bytes": self.transfer_bytes,
            "hand_off_bytes": self.hand_off_bytes,
        }
        for name, values in sizes.items():
            least = 1 if name in ("threads", "cpu_matrix_size", "gpu_matrix_sizes") else 4 * KIB
            if any(value < least for value in values):
                raise ValueError(f"{name} must be at least {least}, got {min(values)}")

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The numbers of threads to measure with, rising."""
        cores = native.num_usable_cpus()
        return tuple(sorted(set(self.threads))) or doubling(cores)

    @property
    def host_bytes(self) -> int:
        """How much host memory to take."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return bytes_beyond_caches()


def doubling(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the number of cores itself."""
    return (*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores)
