"""Measures matmul rates of this computer before a model is loaded, with random weights, in a second."""

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.backend import open_backend
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.predict.cost_model import Curve, MemoryShares
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.profiling.offload import round_trip_s
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.native.relay import RelayStalledError

COLUMNS = 4096
ROWS = 8192  # weight rows, for compute-bound matmuls
WEIGHT_BYTES = 512 * 1024**2  # for bandwidth-bound matmuls; exceeds every cache, also a large GPU's
MANY = 64  # input rows of a compute-bound matmul
COPY_BYTES = 64 * 1024**2
COPIES_IN_A_ROW = 4
READ_BYTES = 256 * 1024**2
READS_TOGETHER = 16
HANDED_BYTES = 8192  # inputs of a matmul of one row
_REPEATS = 2
_CPU = torch.device("cpu")


@cache
def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure matmuls of this dtype on the CPU and a device; quantised matmuls read about as many bytes.

    Cached per process.
    """
    cpu = cpu_few_s, cpu_many_s, cpu_bytes = _products(_CPU, dtype)
    gpu_few_s, gpu_many_s, gpu_bytes = _products(device, dtype) if device.type == "cuda" else cpu
    flops = 2 * ROWS * COLUMNS * MANY
    return Rates(
        cpu_bytes_per_s=cpu_bytes / cpu_few_s,
        cpu_flops=flops / cpu_many_s,
        bus_bytes_per_s=COPY_BYTES / _least_s(_copy(device), device),
        gpu_bytes_per_s=gpu_bytes / gpu_few_s,
        gpu_flops=flops / gpu_many_s,
        offload_ms=_offload_ms(device),
        host_bytes_per_s=native.read_bandwidth(READ_BYTES, repeats=_REPEATS) * 1e9,
    )


@cache
def measured_memory_shares(device: torch.device) -> MemoryShares:
    """Measure how copies to a device and CPU reads slow each other down.

    Cached per process.
    """
    copy = partial(_least_s, _copy(device), device)
    alone = COPY_BYTES / copy(), native.read_bandwidth(READ_BYTES, repeats=_REPEATS) * 1e9
    read: list[float] = []
    reader = threading.Thread(
        target=lambda: read.append(native.read_bandwidth(READ_BYTES, repeats=READS_TOGETHER) * 1e9)
    )
    reader.start()
    copied: list[float] = []
    while reader.is_alive() or not copied:
        copied.append(COPY_BYTES / copy())
    reader.join()
    # The memory's bandwidth is the sum of the rates together. A user's share is its rate alone, relative to
    # that sum. If the two do not disturb each other, the shares add up to at most 1.
    most = max(statistics.median(copied) + read[0], *alone)
    return MemoryShares(*(rate / most for rate in alone))


@cache
def measured_bus_share(device: torch.device) -> float:
    """Measure the bus bandwidth relative to a GPU's memory bandwidth.

    Cached per process.
    """
    near, far = (torch.empty(WEIGHT_BYTES // 2, dtype=torch.uint8, device=device) for _ in range(2))
    own_s = _least_s(partial(near.copy_, far), device) / WEIGHT_BYTES  # per byte: a copy reads and writes
    return own_s / (_least_s(_copy(device), device) / COPY_BYTES)


def measured_swap(device: torch.device, row_bytes: int, most_tokens: int) -> Curve:
    """Measure the copy of a layer's K and V, contiguous, from host memory to a device: over tokens, in ms.

    Args:
        row_bytes: K and V of a token.
    """
    sizes = (1, max(most_tokens, 2))
    return Curve(sizes, [1e3 * _least_s(_copy(device, count * row_bytes), device) for count in sizes])


def measured_duplex(streams: Streams) -> float:
    """Measure the slowdown of copies over the bus in both directions at once: 1 to 2."""
    if streams.device.type != "cuda":
        return 1.0
    ways = [(streams.stream(), _copy(streams.device, to_host=to_host)) for to_host in (False, True)]

    def least_s(ways: list[tuple[torch.cuda.Stream, Callable[[], Tensor]]]) -> float:
        def copy() -> None:
            for stream, start in ways * COPIES_IN_A_ROW:
                with torch.cuda.stream(stream):
                    start()

        return _least_s(copy, streams.device)

    return min(max(least_s(ways) / max(least_s([way]) for way in ways), 1.0), 2.0)


def _offload_ms(device: torch.device) -> float:
    """Return the time to copy few inputs to the CPU and its outputs back, with the signals of iterations."""

    def least_ms(*, in_graph: bool) -> float:
        with closing(open_backend(Streams(device))) as backend:
            trips = (round_trip_s(device, backend, HANDED_BYTES, in_graph=in_graph) for _ in range(_REPEATS))
            return 1e3 * min(trips)

    if device.type == "cuda" and fallbacks.level("graphs") == "host-flags":
        try:
            return least_ms(in_graph=True)
        except (StreamMemoryError, RelayStalledError) as error:
            fallbacks.limit("graphs", "device-only", str(error))
    return least_ms(in_graph=False)


def _products(device: torch.device, dtype: torch.dtype) -> tuple[float, float, int]:
    """Return the seconds of a matmul of one row and of many, and the weight bytes of the first."""
    few_s, nbytes = _product(device, dtype, 1, WEIGHT_BYTES // (COLUMNS * dtype.itemsize))
    many_s, _ = _product(device, dtype, MANY, ROWS)
    return few_s, many_s, nbytes


def _product(device: torch.device, dtype: torch.dtype, count: int, rows: int) -> tuple[float, int]:
    """Return the seconds of a matmul with `rows` weight rows, and the weight bytes."""
    linear: Linear = DENSE.empty(rows, COLUMNS, has_bias=False, dtype=dtype, device=device)
    piece = torch.randn(min(rows, ROWS // 16), COLUMNS, device=device)
    for first in range(0, rows, len(piece)):
        linear.load(first, piece[: rows - first])
    x = torch.randn(count, COLUMNS, device=device).to(dtype)
    out = torch.empty(count, rows, dtype=dtype, device=device)
    return _least_s(partial(linear.multiply, x, out), device), sum(linear.memory().values())


def _copy(device: torch.device, nbytes: int = COPY_BYTES, *, to_host: bool = False) -> Callable[[], Tensor]:
    host = host_memory(lambda pin: torch.ones(nbytes, dtype=torch.uint8, pin_memory=pin), device)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    source, target = (there, host) if to_host else (host, there)
    return lambda: target.copy_(source, non_blocking=True)


def _least_s(work: Callable[[], object], device: torch.device = _CPU) -> float:
    """Return the shortest duration in seconds, without the first run."""

    def once() -> float:
        started_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started_s

    once()
    return min(once() for _ in range(_REPEATS))
