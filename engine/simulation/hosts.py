"""Host presets: memory channels from JEDEC's rates, cores from the vendors' datasheets."""

from neo_desktop.engine.simulation.machine import GB, GIB, HostPreset

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
        title=f"the host of a {name}",
    )


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
    """Return a CPU with two FMA units of `lanes` lanes per core."""
    return HostPreset(
        name,
        memory_gib * GIB,
        gb_per_s * GB,
        cores,
        core_bytes_per_s=core_gb_per_s * GB,
        core_flops=2 * lanes * 2 * ghz * 1e9,
        title=title,
    )


_ALL = (
    # AWS, Intel ARK and NEO, table 1: 8 of the 24 cores of a Xeon Platinum 8259CL (Cascade Lake, six channels
    # of DDR4-2933 = 140.8 GB/s; two AVX-512 FMA units, about 2.5 GHz in AVX-512 code), 64 GB.
    _host(*("g4dn.4xlarge", "the host of a g4dn.4xlarge", 64, 140.8, 8), core_gb_per_s=12, ghz=2.5, lanes=16),
    _zen2("g5.2xlarge", cores=4, memory_gib=32, dies=1),
    _zen2("g5.4xlarge", cores=8, memory_gib=64, dies=1),
    _zen2("g5.8xlarge", cores=16, memory_gib=128, dies=2),
    _zen2("g5.16xlarge", cores=32, memory_gib=256, dies=4),
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

HOSTS = {host.name: host for host in _ALL}
