"""GPU presets from the vendors' datasheets.

Memory is the size that the driver shows: with ECC on it is below the nominal size. Bandwidth is bus width
times data rate. TFLOP/s are dense fp16 matmuls accumulated in fp32, the mode that torch uses. From the Turing
RTX cards on, GeForce cards run that mode at half the advertised rate of fp16 accumulation, which is twice
their plain fp32 rate. Cards below compute capability 8.0 have no bfloat16.
"""

from neo_desktop.engine.simulation.machine import GB, GIB, TFLOPS, GpuPreset

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
        generation, lanes = bus
        bus = lanes * _LANE_BYTES_PER_S[generation] / GB
    return GpuPreset(
        name,
        host=host,
        memory_bytes=int(memory_gib * GIB),
        memory_bytes_per_s=gb_per_s * GB,
        tensor_flops=tflops * TFLOPS,
        bus_bytes_per_s=bus * GB,
        multiprocessors=multiprocessors,
        has_bfloat16=has_bfloat16,
        **shares,
    )


_DDR4, _DDR5 = "ddr4-desktop", "ddr5-desktop"

# name, memory in GiB, GB/s, TFLOP/s, multiprocessors, (PCIe generation, lanes) or GB/s one way, host
_ALL = (
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
    _gpu("rtx-2080-ti", 11, 616, 53.8, 68, (3, 16), _DDR4, has_bfloat16=False),
    # Ampere (GA102 whitepaper, smaller cards scaled to their cores). A laptop's clock depends on the power
    # limit set by its maker; the figures use the middle of the vendor's range.
    _gpu("rtx-3050", 8, 224, 18.2, 20, (4, 8), _DDR4),
    _gpu("rtx-3060", 12, 360, 25.5, 28, (4, 16), _DDR4),
    _gpu("rtx-3060-8gb", 8, 240, 25.5, 28, (4, 16), _DDR4),
    _gpu("rtx-3060-laptop", 6, 336, 22.9, 30, (4, 8), "ddr4-laptop"),
    _gpu("rtx-3060-ti", 8, 448, 32.4, 38, (4, 16), _DDR4),
    _gpu("rtx-3070", 8, 448, 40.6, 46, (4, 16), _DDR4),
    _gpu("rtx-3080", 10, 760, 59.5, 68, (4, 16), _DDR4),
    _gpu("rtx-3090", 24, 936, 71, 82, (4, 16), _DDR4),
    # Ada (its whitepaper).
    _gpu("rtx-4060", 8, 272, 30.2, 24, (4, 8), _DDR5),
    _gpu("rtx-4060-laptop", 8, 256, 23.6, 24, (4, 8), "ddr5-laptop"),
    _gpu("rtx-4060-ti-16gb", 16, 288, 44.1, 34, (4, 8), _DDR5),
    _gpu("rtx-4070", 12, 504, 58.3, 46, (4, 16), _DDR5),
    _gpu("rtx-4070-laptop", 8, 256, 31.3, 36, (4, 8), "ddr5-laptop"),
    _gpu("rtx-4080", 16, 717, 97.5, 76, (4, 16), _DDR5),
    _gpu("rtx-4090", 24, 1008, 165.2, 128, (4, 16), _DDR5, streaming_share=0.85),
    # Blackwell (its whitepaper).
    _gpu("rtx-5060", 8, 448, 38.4, 30, (5, 8), _DDR5),
    _gpu("rtx-5060-ti-16gb", 16, 448, 47.4, 36, (5, 8), _DDR5),
    _gpu("rtx-5070", 12, 672, 61.7, 48, (5, 16), _DDR5),
    _gpu("rtx-5070-ti", 16, 896, 87.9, 70, (5, 16), _DDR5),
    _gpu("rtx-5080", 16, 960, 112.6, 84, (5, 16), _DDR5),
    _gpu("rtx-5090", 32, 1792, 209.5, 170, (5, 16), _DDR5),
)

GPUS = {gpu.name: gpu for gpu in _ALL}
