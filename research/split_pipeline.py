"""Weights in host memory without a GPU: device and bus take stated times, and the CPU computes.

    python -m research.split_pipeline

The pipeline of `engine/execute/offloaded_matmuls.py` runs as on a GPU: recorded like a graph, with a native
relay that multiplies on flags. The CPU's matmuls are real. The device (see `sleeping_device`) takes a GPU's
time to read weights, and the bus its time to copy them, at given rates. Norms and attention, small on a GPU,
take no time. So the bus reads no memory.

A layer's measured matmul time is compared with the prediction (`engine/predict/offloaded_matmul.py`), which
gets this computer's offload time, and with the bound: bytes in host memory over the joint rate of CPU and
bus.
"""

import argparse
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import psutil
import torch

from neo_desktop import native
from neo_desktop.engine.execute.lane import Lane, Work
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import bound_ms, layer_matrices, plan_weights, weight_times
from neo_desktop.engine.profiling.offload import OffloadTimer
from neo_desktop.engine.profiling.stage_timer import StageTimer
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape
from neo_desktop.native.relay import READY, Relay, RelayProduct, empty_flags
from research.sleeping_device import SleepingDevice

CPU = torch.device("cpu")
DTYPE = torch.float16
AROUND = (-0.06, -0.03, 0.0, 0.03, 0.06)  # tried shares, relative to the expected one
IDLE_PERCENT = 15.0  # below this load of the cores the computer is idle
KERNELS = ("rope_append", "norm", "activation")  # skipped


@dataclass(frozen=True)
class Rated:
    """Durations of work on a device with these rates."""

    bus_bytes_per_s: float
    gpu_bytes_per_s: float

    def __call__(self, lane: Lane, work: Work) -> float:
        if not isinstance(work, partial):
            return 0.0
        if lane is not Lane.DEVICE:
            copied = work.args[0]  # one tensor, or several contiguous ones
            nbytes = copied.nbytes if isinstance(copied, torch.Tensor) else sum(x.nbytes for x in copied)
            return float(nbytes / self.bus_bytes_per_s)
        name = getattr(work.func, "__name__", "")
        if name == "multiply_resident":
            split: OffloadedLinear = work.func.__self__  # type: ignore[attr-defined]
            return split.resident_rows * split.columns * DTYPE.itemsize / self.gpu_bytes_per_s
        if name == "multiply_piece":  # read, reordered, read again
            return float(3 * work.args[0].packed.nbytes / self.gpu_bytes_per_s)
        return 0.0


def wait_until_idle(seconds: float) -> None:
    """Wait for a moment without other programs' work, at most this long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and psutil.cpu_percent(interval=0.15) > IDLE_PERCENT:
        pass


def offload_ms() -> float:
    """Measure the round trip between the CPU's relay and the device."""
    with closing(OffloadTimer(CPU, SleepingDevice(lambda lane, work: None), in_graph=True)) as offload:
        return min(offload.seconds(4096) for _ in range(9)) * 1e3


def cpu_bytes_per_s(model: Decoder, rows: int, repeats: int, idle_s: float) -> float:
    """Return the rate at which a relay alone reads the layers' weights in matmuls with `rows` rows."""
    splits = [linear for linear in model.linears() if isinstance(linear, OffloadedLinear)]
    relay = Relay([], num_layers=len(splits))
    best = 0.0
    x = torch.randn(rows * max(split.columns for split in splits)).to(DTYPE)
    out = torch.empty(rows * max(split.host_rows for split in splits), dtype=DTYPE)
    for _ in range(repeats):
        items = []
        for number, split in enumerate(splits):
            matrices = [split.host_matrix(0) if turn == number else None for turn in range(len(splits) + 1)]
            flags, of_x = empty_flags(len(splits) + 1, pinned=False), x[: rows * split.columns]
            items.append(RelayProduct("product", 0, matrices, of_x.view(rows, -1), out, flags, splits))
        wait_until_idle(idle_s)
        relay.start(items)
        for item in items:
            item.flags[READY, :, 0] = 1
        steps = relay.finish()
        seconds = (steps[-1].end_ns - steps[0].start_ns) / 1e9
        best = max(best, sum(split.host.memory()[CPU] for split in splits) / seconds)
    relay.close()
    return best


def best_share(
    model: Decoder, timer: StageTimer, rows: int, near: float, repeats: int, idle_s: float
) -> tuple[float, float]:
    """Return the best streamed share of the weights near the expected one, and a layer's time in ms.

    Shares alternate, and the best time per share counts, because other programs disturb it.
    """
    shares = [min(max(near + step, 0.0), 1.0) for step in AROUND]
    found = []
    for _, share in product(range(repeats), shares):
        wait_until_idle(idle_s)
        model.streamed_shares = StreamedShares((1,), (share,))
        ms = timer.offloaded_linear_ms(rows)[0]
        found.append((ms, share))
    ms, share = min(found)
    return share, ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU's products; the device needs one")
    parser.add_argument("--bus", type=float, default=8.0, help="GB/s")
    parser.add_argument("--gpu", type=float, default=200.0, help="GB/s of its memory")
    parser.add_argument("--weights", nargs="+", type=float, default=[0.06, 0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument(
        "--idle", type=float, default=0.0, help="seconds to wait at most, before a pass, for others to rest"
    )
    arguments = parser.parse_args()
    bus, gpu = arguments.bus * 1e9, arguments.gpu * 1e9
    native.set_default_num_threads(arguments.threads)
    for name in KERNELS:
        fallbacks.limit(name, "torch", "there is no GPU")
    config = replace(
        shape(arguments.shape),
        num_layers=arguments.layers,
        layer_windows=(None,) * arguments.layers,
        vocab_size=1024,
    )
    read = native.read_bandwidth(512 << 20) * 1e9
    print(
        f"{arguments.threads} threads read {read / 1e9:.1f} GB/s; bus {bus / 1e9:g} GB/s, GPU "
        f"{gpu / 1e9:g} GB/s, which only take time; a hand-off {offload_ms() * 1e3:.0f} us"
    )
    print(
        "| weights on the GPU | rows | measured, ms a layer | predicted | bound | bound / measured "
        "| streamed | CPU alone, GB/s |\n" + "|---" * 8 + "|",
        flush=True,
    )
    limits = SchedulerLimits(max_batch_tokens=16, max_batch_requests=4)
    form = Dense(uses_tiles=False)
    matrices = layer_matrices(config, form, DTYPE)
    total = sum(sizes.device_bytes for sizes in matrices.values())
    always = config.weight_bytes(DTYPE, form) - total
    for share in arguments.weights:
        rates = Rates(0.9 * read, 1e12, bus, gpu, 1e13, offload_ms())
        plan = plan_weights(config, form, DTYPE, always + int(share * total), rates)
        model = random_model(
            config, dtype=DTYPE, device=CPU, form=OffloadedFormat(form, DENSE, plan.resident_rows)
        )
        storage = KVStorage({KVTier.DEVICE: KVPool(config, 8, BLOCK_SIZE, DTYPE, CPU)})
        device = SleepingDevice(Rated(bus, gpu))
        with closing(StageTimer(model, storage, limits, gpu=device)) as timer:
            for rows in arguments.rows:
                mine = replace(
                    rates,
                    cpu_bytes_per_s=cpu_bytes_per_s(model, rows, arguments.repeats, arguments.idle),
                    cpu_flops=1e15,
                    offload_ms=offload_ms(),
                )
                expected = weight_times(matrices, plan, mine, rows)
                streamed, ms = best_share(
                    model,
                    timer,
                    rows,
                    expected.streamed_bytes / plan.host_bytes,
                    arguments.repeats,
                    arguments.idle,
                )
                predicted = expected.ms / config.num_layers
                bound = bound_ms(matrices, plan, mine) / config.num_layers
                print(
                    f"| {share:.0%} | {rows} | {ms:.2f} | {predicted:.2f} ({predicted / ms - 1:+.0%}) "
                    f"| {bound:.2f} | {bound / ms:.0%} | {streamed:.0%} "
                    f"| {mine.cpu_bytes_per_s / 1e9:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
