"""The simulator's model of a GPU and a host.

Datasheet figures and the shares that programs reach are separate: the first are facts with a source, the
second estimates with a reason. Bytes are decimal (1 GB = 1e9 bytes) unless a name says GiB.
"""

from dataclasses import dataclass

GB, GIB = 10**9, 2**30
TFLOPS = 10**12


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """One GPU.

    Datasheet: figures of its maker. Shares: the fractions that programs reach. The default shares apply to
    cards of data centres unless a reason is stated beside a card: paged decode attention 0.6 and weight
    streaming 0.8 of the memory bandwidth (measured on slices of an H200: attention reached 0.65 of weight
    streaming, and streaming is commonly 0.75 to 0.9 of the datasheet). Other cards have those of `shares`.
    All have 0.4 of the tensor cores for prompt attention, in torch's kernels for these lengths, and 0.8 of
    PCIe for pinned copies (packet headers, flow control).
    """

    name: str
    host: str  # the host preset it usually comes with
    memory_bytes: int  # as the driver shows it, a little below the nominal size
    memory_bytes_per_s: float
    tensor_flops: float  # dense fp16, accumulated in fp32
    bus_bytes_per_s: float  # to the host, one way
    multiprocessors: int | None  # None: unknown
    has_bfloat16: bool = True
    matmul_share: float = 0.8  # of tensor_flops, for a large matmul;
    streaming_share: float = 0.8  # of memory_bytes_per_s, for a matmul bound by reading weights
    attention_share: float = 0.6  # of memory_bytes_per_s, for paged decode attention
    prefill_attention_share: float = 0.4  # of tensor_flops, for prompt attention
    bus_share: float = 0.8  # of bus_bytes_per_s, for copies from and to pinned memory
    # Ten kernels per layer (norms, matmuls, rotation, cache write, activation) of 2 µs each; see `shares`.
    layer_ms: float = 0.02
    mixture_ms: float = 0.0  # more per layer with experts
    recurrent_ms: float = 0.0  # more per layer with a state matrix

    @property
    def title(self) -> str:
        """The maker's spelling of the name: "RTX 4060 Ti 16 GB"; unknown names stay unchanged."""
        if not self.name.islower():
            return self.name
        return " ".join(_word(word) for word in self.name.split("-"))


@dataclass(frozen=True, slots=True)
class HostPreset:
    """One host, as CPU attention uses it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float  # of the channels that these cores can reach
    cores: int  # physical
    core_bytes_per_s: float  # read bandwidth of one core
    core_flops: float  # fp32: FMA units x lanes x 2 x clock
    title: str = ""  # in a sentence: "a desktop's DDR4 memory"

    # Shares, measured with this project's kernel (docs/performance.md) on Sapphire Rapids. 16 cores read 121
    # of 153.6 GB/s. Of a core's read bandwidth, the kernel loses a tenth to instructions other than loads.
    # 143 of 192 GFLOP/s per core remain for arithmetic, which adds to the reading time instead of hiding in
    # it.
    read_share: float = 0.8
    kernel_share: float = 0.9
    arithmetic_share: float = 0.75
    weights_share: float | None = None  # of memory_bytes_per_s, for weights; None: as CPU attention
    experts_share: float | None = None  # the same, for weights of experts
    idle_cores: int = 1  # left to Python and the driver; if every core spins, iterations stall

    @property
    def attention_cores(self) -> int:
        return max(self.cores - self.idle_cores, 1)

    @property
    def attention_bytes_per_s(self) -> float:
        """KV bandwidth of the attention cores."""
        reachable = min(
            self.memory_bytes_per_s * self.read_share, self.attention_cores * self.core_bytes_per_s
        )
        return reachable * self.kernel_share

    def weights_bytes_per_s(self, *, experts: bool) -> float:
        """Return the rate at which matmuls of few rows read weights, or weights of experts."""
        share = self.experts_share if experts else self.weights_share
        attention = self.attention_bytes_per_s
        return attention if share is None else min(self.memory_bytes_per_s * share, attention)

    @property
    def attention_flops(self) -> float:
        """Their fp32 arithmetic rate."""
        return self.attention_cores * self.core_flops * self.arithmetic_share


_WORDS = {"ti": "Ti", "laptop": "laptop", "super": "Super"}


def _word(word: str) -> str:
    if word.endswith("gb"):
        return f"{word.removesuffix('gb')} GB"
    return _WORDS.get(word, word.upper())
