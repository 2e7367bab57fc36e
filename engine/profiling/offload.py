"""Round trips of offloaded steps, to the CPU and back, in which every request attends only to itself.

The device adds 1 to each output and sends it again, so that a lost copy shows in the end.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.backend import Backend
from neo_desktop.engine.execute.round_trips import RoundTrips, nothing
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import HostCaches, LayerCache, Relay, empty_flags

CHAIN = 32  # consecutive round trips, as in an iteration over 32 layers
TIMEOUT_S = 10.0  # per round trip, which takes microseconds
_HEADS, _HEAD_DIM = 16, 64  # 4 KiB of float32 per request
_ROW_BYTES = _HEADS * _HEAD_DIM * torch.float32.itemsize


class OffloadChain:
    """A program of round trips: q, k and v to the CPU, an output back.

    Args:
        heads: query heads, KV heads and head dimension.
        length: number of round trips.
        pause: delays the device before each trip.
    """

    def __init__(
        self,
        device: torch.device,
        requests: int,
        heads: tuple[int, int, int],
        length: int,
        pause: Callable[[], object] = nothing,
    ) -> None:
        num_heads, kv_heads, head_dim = heads
        pinned = device.type == "cuda"
        qkv = torch.zeros(requests, num_heads + 2 * kv_heads, head_dim, device=device)
        self._out = torch.zeros(requests, num_heads, head_dim, device=device)
        last = self._out[:, :1].expand_as(qkv)
        sent, answer = (torch.empty(x.shape, pin_memory=pinned) for x in (qkv, self._out))
        q, k, v = torch.split(sent, [num_heads, kv_heads, kv_heads], dim=1)
        flags = empty_flags(length, pinned=pinned)
        cache = torch.zeros(requests, kv_heads, 1, head_dim)
        caches = HostCaches([LayerCache(cache, cache.clone(), None, None, window=0)] * length)
        tables = torch.arange(requests, dtype=torch.int32).unsqueeze(1)
        lens = torch.ones(requests, dtype=torch.int32)
        self._relay, self._task = Relay(), caches.decode_task(q, k, v, answer, tables, lens, flags)

        def make() -> None:
            pause()
            torch.add(last, 1, out=qkv)

        trips = RoundTrips(
            flags,
            make,
            send=partial(sent.copy_, qkv, non_blocking=True),
            answer=lambda _: self._attend(answer, v),
            bring=partial(self._out.copy_, answer, non_blocking=True),
        )
        self._program = trips.program(("offload", requests))
        self._length = length
        self._num_runs = 0
        self._attending_s = 0.0

    def run(self, backend: Backend, timeout_s: float, *, in_graph: bool) -> float:
        """Run the program; return the seconds of one round trip without the attention.

        Args:
            in_graph: a relay attends, within a graph if the program has run before; otherwise a thread does.

        Raises:
            RelayStalledError, DeviceStalledError: no response within the timeout.
            StreamMemoryError: the driver refuses stream memory operations.
        """
        self._attending_s = 0.0
        if in_graph:
            self._relay.start([self._task], timeout_s)
        start = time.perf_counter()
        try:
            with backend.on_device():
                backend.start(self._program, with_flags=in_graph, with_graphs=in_graph)
                backend.wait()
        except BaseException:
            self._relay.cancel()
            raise
        taken_s = time.perf_counter() - start
        if in_graph:
            self._attending_s = sum(step.end_ns - step.start_ns for step in self._relay.finish()) / 1e9
        self._num_runs += 1
        return (taken_s - self._attending_s) / self._length

    @property
    def has_lost(self) -> bool:
        """True if a copy was lost: each round trip adds 1 to all values."""
        return not float((self._out.cpu() - self._num_runs * self._length).abs().max()) < 0.01

    def _attend(self, answer: Tensor, v: Tensor) -> None:
        started = time.perf_counter()
        answer.copy_(v[:, :1].expand_as(answer))
        self._attending_s += time.perf_counter() - started


def round_trip_s(device: torch.device, backend: Backend, nbytes: int, *, in_graph: bool) -> float:
    """Return the seconds of one round trip with `nbytes` each way, without the attention itself.

    Args:
        in_graph: see `OffloadChain.run`.

    Raises:
        RuntimeError: see `OffloadChain.run`; or the output is not what was sent.
    """
    chain = OffloadChain(device, max(nbytes // _ROW_BYTES, 1), (_HEADS, 1, _HEAD_DIM), CHAIN)
    seconds = 0.0
    backend.begin(Watchdog(TIMEOUT_S))
    try:
        for _ in range(3):  # in a graph: compiled, captured, launched
            seconds = chain.run(backend, TIMEOUT_S, in_graph=in_graph)
            if chain.has_lost:
                raise RuntimeError(
                    "a transfer between GPU and CPU lost data: the driver or the GPU is at fault"
                )
    except BaseException as error:
        backend.abandon(error)
        raise
    finally:
        backend.forget()
    return seconds
