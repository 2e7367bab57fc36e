"""The CPU's matmuls with weights in host memory during an iteration, against plain reads.

    python -m benchmarks.host_products                       several types, 1, 4 and 16 rows
    python -m benchmarks.host_products --types Q4_K --rows 1

A relay computes the matrices of a model's layers, as in an iteration whose device is never late. Reads of the
same number of bytes by the same threads alternate with it. The best time of either counts, because other
programs disturb both.
"""

import argparse

import torch

from neo_desktop import native
from neo_desktop.models.decoder import TURN
from neo_desktop.models.linear.packed import PackedMatrix, huge_pages
from neo_desktop.models.linear.quantised import PartShape, Quantised
from neo_desktop.models.linear.tiles import Tiles
from neo_desktop.models.shapes import shape
from neo_desktop.native.relay import READY, Relay, empty_flags, matmul_task

DENSE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")


def matrix(type_name: str, rows: int, columns: int) -> PackedMatrix:
    """Return a matrix of small numbers."""
    if dtype := DENSE.get(type_name):
        tiles = Tiles(rows, columns, None, dtype)
        tiles.load(0, torch.randn(rows, columns, dtype=dtype) * 0.02)
        return tiles
    quantised = Quantised([PartShape(type_name, rows)], columns, None, torch.float16)
    for part in quantised.parts:
        part.packed.random_(0, 32)  # small scales
    return quantised


class Layers:
    """The matrices of some layers.

    Args:
        model: its shapes are used.
        type_name: of the weights.
        num_bytes: approximate size, above that of caches.
    """

    def __init__(self, model: str, type_name: str, num_bytes: int) -> None:
        matrices = dict(shape(model).each_matrix())
        sizes = [(name, matrices[f"0.{name}"]) for name in TURN]
        self.dtype = DENSE.get(type_name, torch.float16)  # of x
        self.matrices = {name: [matrix(type_name, of.rows, of.columns)] for name, of in sizes}
        self.columns = {name: of.columns for name, of in sizes}
        layer_bytes = self.nbytes
        while self.nbytes + layer_bytes // 2 < num_bytes:
            for name, of in sizes:
                self.matrices[name].append(matrix(type_name, of.rows, of.columns))
        self.relay = Relay()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(each.memory()[CPU] for those in self.matrices.values() for each in those)

    def seconds(self, rows: int) -> float:
        """Multiply this many rows with all matrices; return the seconds."""
        tasks = []
        for name, those in self.matrices.items():
            turns, lag = [each.native for each in those], int(name != "qkv")
            tasks.append(
                matmul_task(
                    name,
                    [None, *turns] if lag else [*turns, None],
                    torch.randn(rows, self.columns[name], dtype=self.dtype),
                    torch.empty(rows * max(each.rows for each in those), dtype=self.dtype),
                    empty_flags(len(those) + 1, pinned=False),
                    lag=lag,
                    owners=those,
                )
            )
        self.relay.start(tasks)
        for task in tasks:
            task.flags[READY, :, 0] = 1
        steps = self.relay.finish()
        return (steps[-1].end_ns - steps[0].start_ns) / 1e9


def main() -> None:
    """Measure, and print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="whose shapes the matrices have")
    parser.add_argument("--types", nargs="+", default=["float16", "bfloat16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--megabytes", type=int, default=512, help="of weights, more than caches hold")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{native.default_num_threads()} threads, {native.default_isa()}")
    for name in arguments.types:
        layers = Layers(arguments.model, name, arguments.megabytes << 20)
        other = huge_pages(layers.nbytes).fill_(1)
        for rows in arguments.rows:
            times = [(layers.seconds(rows), native.read_seconds(other)) for _ in range(arguments.repeats)]
            product, read = (layers.nbytes / min(each) / 1e9 for each in zip(*times, strict=True))
            share = f"{product / read:.0%}"
            print(f"{name:9} {rows:3} rows: {product:5.1f} GB/s, reads {read:5.1f} GB/s: {share}", flush=True)


if __name__ == "__main__":
    main()
