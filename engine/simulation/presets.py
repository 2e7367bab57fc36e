"""Machines by name: GPUs from the vendors' datasheets, hosts by memory channels and cores.

Memory is the size that the driver shows: with ECC on it is below the nominal size. Bandwidth is bus width
times data rate. TFLOP/s are dense fp16 matmuls accumulated in fp32, the mode that torch uses. From the Turing
RTX cards on, GeForce cards run that mode at half the advertised rate of fp16 accumulation, which is twice
their plain fp32 rate. Cards below compute capability 8.0 have no bfloat16. The shares that consumer cards and
hosts reach are those of `shares`, fitted to published speeds.

Hosts: channels by JEDEC's rates, cores by the vendors' datasheets.
"""

from difflib import get_close_matches

from neo_desktop.engine.simulation import shares as fitted
from neo_desktop.engine.simulation.machine import GB, GIB, TFLOPS, GpuPreset, HostPreset

__all__ = ["GB", "GIB", "GPUS", "HOSTS", "TFLOPS", "GpuPreset", "HostPreset", "get_gpu", "get_host"]

# PCIe generation -> bytes/s per lane, one way
_LANE_BYTES_PER_S = {3: 15.75 * GB / 16, 4: 31.5 * GB / 16, 5: 63 * GB / 16}


def _gpu(
    name: str,
    memory_gib: float,
    gb_per_s: float,
    tflops: float,
    multiprocessors: int,
    bus: tuple[int, int] | float,
    host: str,
    *,
    has_bfloat16: bool = True,
    **shares: float,
) -> GpuPreset:
    if isinstance(bus, tuple):
        pcie, lanes = bus
        bus = lanes * _LANE_BYTES_PER_S[pcie] / GB
    if (generation := fitted.generation(name)) is not None:
        reached = fitted.CARDS[generation]
        shares = {
            "streaming_share": reached.streaming,
            "attention_share": reached.attention,
            "layer_ms": reached.layer_us / 1e3,
        }
    return GpuPreset(
        name,
        host=host,
        memory_bytes=int(memory_gib * GIB),
        memory_bytes_per_s=gb_per_s * GB,
        tensor_flops=tflops * TFLOPS,
        bus_bytes_per_s=bus * GB,
        multiprocessors=multiprocessors,
        has_bfloat16=has_bfloat16,
        mixture_ms=fitted.MIXTURE_US / 1e3,
        recurrent_ms=fitted.RECURRENT_US / 1e3,
        **shares,
    )


_DDR4, _DDR5 = "ddr4-desktop", "ddr5-desktop"

# name, memory in GiB, GB/s, TFLOP/s, multiprocessors, (PCIe generation, lanes) or GB/s one way, host
_GPUS = (
    # Data centres. T4 (2019): a power limit of 70 W throttles matmuls early, and Jia et al., arXiv
    # 1903.07486, measured 220 of 320 GB/s. A10G: 70 TFLOP/s dense, where the A10 has 125. L4 and A2 have
    # limits of 72 and 60 W. H100: power and the tail of a matmul keep matmuls near 0.65.
    _gpu(
        *("t4", 15, 320, 65, 40, (3, 16), "g4dn.4xlarge"),
        has_bfloat16=False,
        matmul_share=0.45,
        streaming_share=0.69,
        attention_share=0.55,
    ),
    _gpu("a10g", 22.5, 600, 70, 80, (4, 16), "g5.4xlarge", matmul_share=0.75),
    _gpu("l4", 22.5, 300, 121, 58, (4, 16), "g6.4xlarge", matmul_share=0.45),
    _gpu("a2", 15, 200, 18, 10, (4, 8), "ddr4-workstation", matmul_share=0.6),
    _gpu("a100-40gb", 39.5, 1555, 312, 108, (4, 16), "ddr4-server"),
    _gpu("a100-80gb", 79.2, 2039, 312, 108, (4, 16), "ddr4-server"),
    _gpu("h100", 78.125, 3350, 989, 132, (5, 16), "hgx-h100-numa-node", matmul_share=0.65),
    # GH200 (its datasheet): an H100 with 96 GB of HBM3 at 4 TB/s; NVLink-C2C has 900 GB/s, 450 each way.
    _gpu("gh200", 95.5, 4000, 989, 132, 450.0, "gh200-grace", matmul_share=0.65),
    # Turing. The GTX cards have no tensor cores: the figure is plain fp32.
    _gpu("gtx-1650", 4, 128, 2.98, 14, (3, 16), _DDR4, has_bfloat16=False),
    _gpu("gtx-1660", 6, 192, 5.03, 22, (3, 16), _DDR4, has_bfloat16=False),
    _gpu("rtx-2060", 6, 336, 25.8, 30, (3, 16), _DDR4, has_bfloat16=False),
    _gpu("rtx-2080", 8, 448, 40.3, 46, (3, 16), _DDR4, has_bfloat16=False),
    _gpu("rtx-2080-ti", 11, 616, 53.8, 68, (3, 16), _DDR4, has_bfloat16=False),
    # Ampere (GA102 whitepaper, smaller cards scaled to their cores). A laptop's clock depends on the power
    # limit set by its maker; the figures use the middle of the vendor's range.
    _gpu("rtx-3050", 8, 224, 18.2, 20, (4, 8), _DDR4),
    _gpu("rtx-3060", 12, 360, 25.5, 28, (4, 16), _DDR4),
    _gpu("rtx-3060-8gb", 8, 240, 25.5, 28, (4, 16), _DDR4),
    _gpu("rtx-3060-laptop", 6, 336, 22.9, 30, (4, 8), "ddr4-laptop"),
    _gpu("rtx-3060-ti", 8, 448, 32.4, 38, (4, 16), _DDR4),
    _gpu("rtx-3070", 8, 448, 40.6, 46, (4, 16), _DDR4),
    _gpu("rtx-3070-ti", 8, 608, 43.5, 48, (4, 16), _DDR4),
    _gpu("rtx-3080", 10, 760, 59.5, 68, (4, 16), _DDR4),
    _gpu("rtx-3080-ti", 12, 912, 68.2, 80, (4, 16), _DDR4),
    _gpu("rtx-3090", 24, 936, 71, 82, (4, 16), _DDR4),
    _gpu("rtx-3090-ti", 24, 1008, 80, 84, (4, 16), _DDR4),
    # Ada (its whitepaper).
    _gpu("rtx-4060", 8, 272, 30.2, 24, (4, 8), _DDR5),
    _gpu("rtx-4060-laptop", 8, 256, 23.6, 24, (4, 8), "ddr5-laptop"),
    _gpu("rtx-4060-ti", 8, 288, 44.1, 34, (4, 8), _DDR5),
    _gpu("rtx-4060-ti-16gb", 16, 288, 44.1, 34, (4, 8), _DDR5),
    _gpu("rtx-4070", 12, 504, 58.3, 46, (4, 16), _DDR5),
    _gpu("rtx-4070-laptop", 8, 256, 31.3, 36, (4, 8), "ddr5-laptop"),
    _gpu("rtx-4070-super", 12, 504, 70.9, 56, (4, 16), _DDR5),
    _gpu("rtx-4070-ti", 12, 504, 80.2, 60, (4, 16), _DDR5),
    _gpu("rtx-4070-ti-super", 16, 672, 88.2, 66, (4, 16), _DDR5),
    _gpu("rtx-4080", 16, 717, 97.5, 76, (4, 16), _DDR5),
    _gpu("rtx-4080-super", 16, 736, 104.4, 80, (4, 16), _DDR5),
    _gpu("rtx-4090", 24, 1008, 165.2, 128, (4, 16), _DDR5),
    # Blackwell (its whitepaper).
    _gpu("rtx-5060", 8, 448, 38.4, 30, (5, 8), _DDR5),
    _gpu("rtx-5060-ti-16gb", 16, 448, 47.4, 36, (5, 8), _DDR5),
    _gpu("rtx-5070", 12, 672, 61.7, 48, (5, 16), _DDR5),
    _gpu("rtx-5070-ti", 16, 896, 87.9, 70, (5, 16), _DDR5),
    _gpu("rtx-5080", 16, 960, 112.6, 84, (5, 16), _DDR5),
    _gpu("rtx-5090", 32, 1792, 209.5, 170, (5, 16), _DDR5),
)

GPUS = {gpu.name: gpu for gpu in _GPUS}


def _host(
    name: str,
    title: str,
    memory_gib: int,
    gb_per_s: float,
    cores: int,
    *,
    core_gb_per_s: float,
    ghz: float,
    lanes: int = 8,
) -> HostPreset:
    """Return a CPU with two FMA units of `lanes` lanes per core.

    Desktops, laptops and workstations read weights as llama.cpp does there. Servers read them as this
    project's kernel did on Sapphire Rapids; CPU attention does so on all hosts.
    """
    kind, _, form = name.partition("-")
    kind = kind.removeprefix("lp")[:4]  # LPDDR5X is taken as DDR5
    reached = fitted.HOSTS.get(kind) if form in ("desktop", "laptop", "workstation") else None
    return HostPreset(
        name,
        memory_gib * GIB,
        gb_per_s * GB,
        cores,
        core_bytes_per_s=core_gb_per_s * GB,
        core_flops=2 * lanes * 2 * ghz * 1e9,
        title=title,
        weights_share=None if reached is None else reached.weights,
        experts_share=None if reached is None else reached.experts,
    )


_HOSTS = (
    # AWS, Intel ARK and NEO, table 1: 8 of the 24 cores of a Xeon Platinum 8259CL (Cascade Lake, six channels
    # of DDR4-2933 = 140.8 GB/s; two AVX-512 FMA units, about 2.5 GHz in AVX-512 code), 64 GB.
    _host(*("g4dn.4xlarge", "the host of a g4dn.4xlarge", 64, 140.8, 8), core_gb_per_s=12, ghz=2.5, lanes=16),
    # AMD EPYC 7002 product brief and NEO, table 1: EPYC 7R32, Zen 2 (2 FMA units of 8 lanes, about 3.0 GHz),
    # eight channels of DDR4-3200 = 204.8 GB/s per socket. A die of 8 cores reads 32 bytes per fabric clock of
    # 1.6 GHz = 51.2 GB/s, so an instance sees one die's share per eight cores. NEO, section 5.5, found the
    # same steps: g5.2xlarge about as fast as g5.4xlarge, then twice, then twice again.
    _host("g5.2xlarge", "the host of a g5.2xlarge", 32, 51.2, 4, core_gb_per_s=20, ghz=3.0),
    _host("g5.4xlarge", "the host of a g5.4xlarge", 64, 51.2, 8, core_gb_per_s=20, ghz=3.0),
    _host("g5.8xlarge", "the host of a g5.8xlarge", 128, 102.4, 16, core_gb_per_s=20, ghz=3.0),
    _host("g5.16xlarge", "the host of a g5.16xlarge", 256, 204.8, 32, core_gb_per_s=20, ghz=3.0),
    # AWS: EPYC 7R13 (Zen 3), one die of 8 cores, as above.
    _host("g6.4xlarge", "the host of a g6.4xlarge", 64, 51.2, 8, core_gb_per_s=25, ghz=3.4),
    # Two channels of DDR4-3200; a Zen 3 class CPU of 6 or 8 cores, in a laptop at a lower clock.
    _host("ddr4-laptop", "a laptop's DDR4 memory", 16, 51.2, 6, core_gb_per_s=22, ghz=3.6),
    _host("ddr4-desktop", "a desktop's DDR4 memory", 32, 51.2, 8, core_gb_per_s=25, ghz=4.4),
    # Two channels of DDR5-5600; a Zen 4 class CPU of 8 cores, with two FMA of 8 lanes per clock.
    _host("ddr5-laptop", "a laptop's DDR5 memory", 32, 89.6, 8, core_gb_per_s=30, ghz=4.0),
    _host("ddr5-desktop", "a desktop's DDR5 memory", 64, 89.6, 8, core_gb_per_s=35, ghz=4.8),
    # 128 bits of LPDDR5X-7500, soldered; a Zen 5 class CPU.
    _host("lpddr5x-laptop", "a laptop's LPDDR5X memory", 32, 120, 8, core_gb_per_s=30, ghz=4.0),
    # Threadripper 3000 and 7000: four channels of DDR4-3200; eight of DDR5-5200.
    _host("ddr4-workstation", "a workstation's DDR4 memory", 128, 102.4, 16, core_gb_per_s=25, ghz=3.8),
    _host("ddr5-workstation", "a workstation's DDR5 memory", 256, 332.8, 32, core_gb_per_s=30, ghz=4.0),
    # One socket: EPYC 7003 with eight channels of DDR4-3200; EPYC 9004 with twelve of DDR5-4800.
    _host("ddr4-server", "a server's DDR4 memory", 256, 204.8, 32, core_gb_per_s=20, ghz=3.0),
    _host("ddr5-server", "a server's DDR5 memory", 384, 460.8, 48, core_gb_per_s=25, ghz=3.2),
    # NVIDIA's Grace datasheet: 72 Neoverse V2 cores (four vector units of 4 lanes, 3.1 GHz), 480 GB LPDDR5X
    # at 384 GB/s: half of the 960 GB and 768 GB/s of two chips. With 120 or 240 GB it would be 512 GB/s.
    _host("gh200-grace", "the Grace half of a GH200", 447, 384, 72, core_gb_per_s=25, ghz=3.1),
    # Intel ARK and NEO, table 1: a quarter of two Xeon Platinum 8462Y+ (Sapphire Rapids, eight channels of
    # DDR5-4800 = 307.2 GB/s per socket, two NUMA nodes each): 16 cores, 153.6 GB/s, 512 GB. One core read
    # 12 GB/s in a measurement.
    _host(
        *("hgx-h100-numa-node", "a quarter of an HGX H100 host", 512, 153.6, 16),
        core_gb_per_s=12,
        ghz=3.0,
        lanes=16,
    ),
)

HOSTS = {host.name: host for host in _HOSTS}


def get_gpu(name: str) -> GpuPreset:
    """Return the GPU with that name, in any common spelling: "RTX 3060 12GB", "4090", "GeForce RTX 4060 Ti".

    Raises:
        ValueError: unknown name; the message lists the valid ones.
    """
    plain = _plain(name).removeprefix("nvidia").removeprefix("geforce")
    gpu = GPUS.get(_ALIASES.get(plain, name.lower()))
    if gpu is None:
        raise ValueError(f"no GPU preset is called {name!r}{_instead(name.lower(), list(GPUS))}")
    return gpu


def get_host(name: str) -> HostPreset:
    """Return the host with that name; ValueError lists the valid names."""
    host = HOSTS.get(name.lower())
    if host is None:
        raise ValueError(f"no host preset is called {name!r}{_instead(name.lower(), list(HOSTS))}")
    return host


def _instead(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"{meant}: choose one of {', '.join(names)}"


def _plain(name: str) -> str:
    """Return the name in lower case without spaces and dashes."""
    return "".join(character for character in name.lower() if character.isalnum())


_ALIASES = (
    {_plain(name).removeprefix("rtx").removeprefix("gtx"): name for name in GPUS}
    | {_plain(name): name for name in GPUS}
    | {
        "rtx306012gb": "rtx-3060",
        "rtx5060ti": "rtx-5060-ti-16gb",
        "a100": "a100-80gb",
        "h100sxm": "h100",
    }
)
