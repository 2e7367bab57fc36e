"""Machines as their datasheets describe them, and what share of those figures real programs reach.

A datasheet's figure and the share of it that kernels get are kept apart: the first is a fact with a source,
the second an estimate with a reason. Bytes are decimal (1 GB = 1e9 bytes) unless a name says GiB.
"""

from dataclasses import dataclass

GB, GIB = 10**9, 2**30
TFLOPS = 10**12


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """One GPU.

    Datasheet: what its maker states. Shares: how much of that a program gets, with the reasons at `GPUS`.
    """

    name: str
    host: str  # the host preset it is usually found in
    memory_bytes: int  # what the driver shows, which is a little less than the name says
    memory_bytes_per_s: float
    tensor_flops: float  # dense fp16, accumulated in fp32
    bus_bytes_per_s: float  # PCIe, one way
    multiprocessors: int
    matmul_share: float  # of tensor_flops, by a large matrix product
    streaming_share: float  # of memory_bytes_per_s, by a product that is bound by reading weights
    attention_share: float = 0.6  # of memory_bytes_per_s, by paged decode attention
    prefill_attention_share: float = 0.4  # of tensor_flops, by attention of a prompt
    bus_share: float = 0.8  # of bus_bytes_per_s, by copies from and to pinned memory


@dataclass(frozen=True, slots=True)
class HostPreset:
    """One host, as far as CPU attention can use it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float  # of the channels that the cores below can reach
    cores: int  # physical
    core_bytes_per_s: float  # what one core can read
    core_flops: float  # fp32: FMA units x lanes x 2 x clock

    # Shares, measured with this project's kernel (docs/performance.md) on Sapphire Rapids: 16 cores read 121
    # of 153.6 GB/s; of what the cores can read, the kernel loses a tenth to everything but loads; and 143 of
    # 192 GFLOP/s per core remain for multiplying, which adds to the reading time rather than hiding in it.
    read_share: float = 0.8
    kernel_share: float = 0.9
    arithmetic_share: float = 0.75
    idle_cores: int = 1  # left to Python and the driver; with every core spinning, iterations stall

    @property
    def attention_cores(self) -> int:
        """Cores that compute attention."""
        return max(self.cores - self.idle_cores, 1)

    @property
    def attention_bytes_per_s(self) -> float:
        """KV that they can stream."""
        reachable = min(
            self.memory_bytes_per_s * self.read_share, self.attention_cores * self.core_bytes_per_s
        )
        return reachable * self.kernel_share

    @property
    def attention_flops(self) -> float:
        """What they can compute in fp32."""
        return self.attention_cores * self.core_flops * self.arithmetic_share


# Shares of a GPU that hold for all: paged decode attention 0.6 and weight streaming 0.8 of the memory
# bandwidth. Measured on slices of an H200: attention reached 0.65 of what weight streaming reached, and
# streaming is commonly 0.75 to 0.9 of the datasheet. Prompt attention reaches 0.4 of the tensor cores in
# torch's kernels for these lengths; pinned copies reach 0.8 of PCIe (packet headers, flow control).
GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA T4 datasheet (2019): 16 GB GDDR6 at 320 GB/s, 65 TFLOP/s, PCIe 3.0 x16, 40 SMs, 70 W; with
        # ECC on, 15 GiB are visible. The power limit throttles matrix products early, and Jia et al., arXiv
        # 1903.07486, measured 220 of 320 GB/s.
        GpuPreset(
            "t4",
            host="g4dn.4xlarge",
            memory_bytes=15 * GIB,
            memory_bytes_per_s=320 * GB,
            tensor_flops=65 * TFLOPS,
            bus_bytes_per_s=15.75 * GB,
            multiprocessors=40,
            matmul_share=0.45,
            streaming_share=0.69,
            attention_share=0.55,
        ),
        # NVIDIA A10G datasheet: 24 GB GDDR6 at 600 GB/s, 70 TFLOP/s dense (the A10 has 125), PCIe 4.0 x16,
        # 80 SMs; with ECC on, 22.5 GiB are visible.
        GpuPreset(
            "a10g",
            host="g5.4xlarge",
            memory_bytes=int(22.5 * GIB),
            memory_bytes_per_s=600 * GB,
            tensor_flops=70 * TFLOPS,
            bus_bytes_per_s=31.5 * GB,
            multiprocessors=80,
            matmul_share=0.75,
            streaming_share=0.8,
        ),
        # NVIDIA GeForce RTX 3060 12GB: 360 GB/s (192 bit, 15 Gbit/s), 28 SMs, PCIe 4.0 x16. Tensor cores of
        # GeForce cards accumulate in fp32 at half rate: 25.5 TFLOP/s (GA102 whitepaper, scaled to 28 SMs).
        GpuPreset(
            "rtx-3060",
            host="ddr4-desktop",
            memory_bytes=12 * GIB,
            memory_bytes_per_s=360 * GB,
            tensor_flops=25.5 * TFLOPS,
            bus_bytes_per_s=31.5 * GB,
            multiprocessors=28,
            matmul_share=0.8,
            streaming_share=0.8,
        ),
        # NVIDIA Ada GPU architecture whitepaper: RTX 4090 24 GB GDDR6X at 1008 GB/s, 165.2 TFLOP/s with fp32
        # accumulation, 128 SMs, PCIe 4.0 x16.
        GpuPreset(
            "rtx-4090",
            host="ddr5-desktop",
            memory_bytes=24 * GIB,
            memory_bytes_per_s=1008 * GB,
            tensor_flops=165.2 * TFLOPS,
            bus_bytes_per_s=31.5 * GB,
            multiprocessors=128,
            matmul_share=0.8,
            streaming_share=0.85,
        ),
        # NVIDIA H100 SXM5 datasheet: 80 GB HBM3 at 3.35 TB/s, 989 TFLOP/s dense, 132 SMs, PCIe 5.0 x16. Power
        # and the tail of each product keep matrix products near 0.65.
        GpuPreset(
            "h100",
            host="hgx-h100-numa-node",
            memory_bytes=80 * 10**3 * 2**20,
            memory_bytes_per_s=3350 * GB,
            tensor_flops=989 * TFLOPS,
            bus_bytes_per_s=63 * GB,
            multiprocessors=132,
            matmul_share=0.65,
            streaming_share=0.8,
        ),
    )
}

# AMD EPYC 7002 product brief and NEO, table 1: EPYC 7R32, Zen 2 (2 FMA units of 8 lanes, about 3.0 GHz),
# eight channels of DDR4-3200 = 204.8 GB/s per socket. A die of 8 cores reads 32 bytes per fabric clock of 1.6
# GHz = 51.2 GB/s, so an instance sees one die's share per eight cores. NEO, section 5.5, found the same
# steps: g5.2xlarge about as fast as g5.4xlarge, then twice, then twice again.
_ZEN2_DIE = 51.2 * GB


def _zen2(name: str, cores: int, memory_gib: int, dies: int) -> HostPreset:
    return HostPreset(
        name,
        memory_gib * GIB,
        dies * _ZEN2_DIE,
        cores,
        core_bytes_per_s=20.0 * GB,
        core_flops=2 * 8 * 2 * 3.0e9,
    )


HOSTS = {
    host.name: host
    for host in (
        # AWS, Intel ARK and NEO, table 1: 8 of the 24 cores of a Xeon Platinum 8259CL (Cascade Lake, six
        # channels of DDR4-2933 = 140.8 GB/s; two AVX-512 FMA units, about 2.5 GHz in such code), 64 GB.
        HostPreset(
            "g4dn.4xlarge", 64 * GIB, 140.8 * GB, 8, core_bytes_per_s=12.0 * GB, core_flops=2 * 16 * 2 * 2.5e9
        ),
        _zen2("g5.2xlarge", cores=4, memory_gib=32, dies=1),
        _zen2("g5.4xlarge", cores=8, memory_gib=64, dies=1),
        _zen2("g5.8xlarge", cores=16, memory_gib=128, dies=2),
        _zen2("g5.16xlarge", cores=32, memory_gib=256, dies=4),
        # JEDEC: two channels of DDR4-3200 = 51.2 GB/s; a Zen 3 class CPU of 8 cores at 4.4 GHz.
        HostPreset(
            "ddr4-desktop", 32 * GIB, 51.2 * GB, 8, core_bytes_per_s=25.0 * GB, core_flops=2 * 8 * 2 * 4.4e9
        ),
        # JEDEC: two channels of DDR5-5600 = 89.6 GB/s; a Zen 4 class CPU of 8 cores at 4.8 GHz, whose AVX-512
        # runs two FMA of 8 lanes per clock.
        HostPreset(
            "ddr5-desktop", 64 * GIB, 89.6 * GB, 8, core_bytes_per_s=35.0 * GB, core_flops=2 * 8 * 2 * 4.8e9
        ),
        # Intel ARK and NEO, table 1: a quarter of two Xeon Platinum 8462Y+ (Sapphire Rapids, eight channels
        # of DDR5-4800 = 307.2 GB/s per socket, two NUMA nodes each): 16 cores, 153.6 GB/s, 512 GB. One core
        # was measured to read 12 GB/s.
        HostPreset(
            "hgx-h100-numa-node",
            512 * GIB,
            153.6 * GB,
            16,
            core_bytes_per_s=12.0 * GB,
            core_flops=2 * 16 * 2 * 3.0e9,
        ),
    )
}


def get_gpu(name: str) -> GpuPreset:
    """Return the GPU of that name, whatever its capitals; ValueError lists the names where there is none."""
    gpu = GPUS.get(_ALIASES.get(_plain(name), name.lower()))
    if gpu is None:
        raise ValueError(f"no GPU preset is called {name!r}: choose one of {', '.join(GPUS)}")
    return gpu


def get_host(name: str) -> HostPreset:
    """Return the host of that name; ValueError lists the names where there is none."""
    host = HOSTS.get(name.lower())
    if host is None:
        raise ValueError(f"no host preset is called {name!r}: choose one of {', '.join(HOSTS)}")
    return host


def _plain(name: str) -> str:
    """Return the name without capitals, spaces and dashes."""
    return "".join(character for character in name.lower() if character.isalnum())


_ALIASES = {_plain(name): name for name in GPUS} | {"rtx306012gb": "rtx-3060", "h100sxm": "h100"}
