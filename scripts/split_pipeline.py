"""Weights in host memory, without a GPU: a device and a bus that sleep, and a CPU that works.

    python scripts/split_pipeline.py

The pipeline of `engine/execute/split_products.py` runs on threads. The CPU's products are real. The device's
lane sleeps as long as a GPU would read, and the bus's as long as it would bring weights, at rates that are
given. What a layer's products take is compared with the prediction (`engine/predict/split_product.py`), and
with the bound: bytes in host memory over what CPU and bus read together.
"""

import argparse
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.split_product import Rates
from neo_desktop.engine.predict.weight_plan import bound_ms, layer_matrices, plan_weights, weight_times
from neo_desktop.engine.profiling.rates import HAND_OFF_MS
from neo_desktop.engine.profiling.shares import measured_shares
from neo_desktop.engine.profiling.stage_timer import StageTimer
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.split import Piece, Split, SplitForm
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape

CPU = torch.device("cpu")
DTYPE = torch.float16
SECONDS = 5.0  # of each measurement


@dataclass
class Bus:
    """Stands for a buffer on the device: what is copied to it takes its time."""

    bytes_per_s: float

    def __getitem__(self, _: slice) -> "Bus":
        return self

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        time.sleep(source.nbytes / self.bytes_per_s)


def slow_down(gpu_bytes_per_s: float) -> None:
    """Let split matrices take as long on the device as reading their weights would."""

    def multiply_resident(self: Split, x: Tensor, out: Tensor) -> None:
        time.sleep(self.resident_rows * self.columns * DTYPE.itemsize / gpu_bytes_per_s)

    def multiply_piece(self: Split, piece: Piece, staged: Bus, room: Tensor, x: Tensor, out: Tensor) -> None:
        # Read, written in another order, read again.
        time.sleep(3 * piece.packed.nbytes / gpu_bytes_per_s)

    Split.multiply_resident = multiply_resident  # type: ignore[method-assign]
    Split.multiply_piece = multiply_piece  # type: ignore[assignment,method-assign]


def cpu_bytes_per_s(model: Decoder, rows: int) -> float:
    """Return how fast the CPU alone reads the weights of all layers in products of so many rows."""
    splits = [linear for linear in model.linears() if isinstance(linear, Split)]
    best = 0.0
    for _ in range(5):
        seconds = 0.0
        for split in splits:
            x = torch.randn(rows, split.columns).to(DTYPE)
            out = torch.empty(rows, split.host_rows, dtype=DTYPE)
            started_s = time.perf_counter()
            split.multiply_host(x, out, 0)
            seconds += time.perf_counter() - started_s
        best = max(best, sum(split.host.memory()[CPU] for split in splits) / seconds)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bus", type=float, default=8.0, help="GB/s")
    parser.add_argument("--gpu", type=float, default=200.0, help="GB/s of its memory")
    arguments = parser.parse_args()
    bus, gpu = arguments.bus * 1e9, arguments.gpu * 1e9
    slow_down(gpu)
    config = replace(
        shape(arguments.shape), num_layers=arguments.layers, layer_windows=(None,) * arguments.layers
    )
    read = native.read_bandwidth(512 << 20) * 1e9
    print(f"memory reads at {read / 1e9:.1f} GB/s; bus {bus / 1e9:g} GB/s, GPU {gpu / 1e9:g} GB/s (sleeping)")
    print("rows, weights on the GPU: measured / predicted per layer, bound / measured, CPU's rate / memory's")
    limits = SchedulerLimits(max_batch_tokens=16, max_batch_requests=4)
    form = Dense(uses_tiles=False)
    matrices = layer_matrices(config, form, DTYPE)
    total = sum(sizes.device_bytes for sizes in matrices.values())
    always = config.weight_bytes(DTYPE, form) - total
    for share in (0.06, 0.25, 0.5, 0.75):
        rates = Rates(0.8 * read, 1e12, bus, gpu, 1e13, HAND_OFF_MS)  # the bus reads no memory
        plan = plan_weights(config, form, DTYPE, always + int(share * total), rates)
        model = random_model(config, dtype=DTYPE, device=CPU, form=SplitForm(form, DENSE, plan.resident_rows))
        pool = KVPool(config, 8, BLOCK_SIZE, DTYPE, CPU)
        storage = KVStorage({Place.DEVICE: pool})
        with closing(StageTimer(model, storage, limits)) as timer:
            split = timer._split
            assert split is not None
            split.buffers = cast("list[Tensor]", [Bus(bus)] * len(split.buffers))
            for rows in (1, 4, 16):
                alone = cpu_bytes_per_s(model, rows)
                mine = replace(rates, cpu_bytes_per_s=alone, cpu_flops=1e15)
                model.streamed_shares = measured_shares(timer, rows, SECONDS)
                end = time.perf_counter() + SECONDS
                found: list[tuple[float, float]] = []
                while time.perf_counter() < end:
                    found.append(timer._split_linear_ms(split, rows))
                ms, host_ms = sorted(found)[len(found) // 4]
                predicted = weight_times(matrices, plan, mine, rows).ms / config.num_layers
                bound = bound_ms(matrices, plan, mine) / config.num_layers
                of_cpu = sum(
                    each.host_rows * each.split.columns * DTYPE.itemsize
                    for each in split.divided(rows).values()
                )
                rate = of_cpu / config.num_layers / host_ms * 1e3 if host_ms else 0.0
                print(
                    f"{rows:3} {share:4.0%}: {ms:6.2f} / {predicted:6.2f} ms, bound {bound / ms:4.0%}, CPU "
                    f"{rate / 1e9:5.1f} GB/s ({rate / read:4.0%}), streamed "
                    f"{model.streamed_shares.of(rows):.2f}"
                )


if __name__ == "__main__":
    main()
