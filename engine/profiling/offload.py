"""Measures the round trip of one offloaded step: to the CPU and back."""

import time

import torch

from neo_desktop.engine.execute.backend import Backend
from neo_desktop.engine.execute.round_trips import RoundTrips
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import Relay, RelayBatch, RelayLayer, empty_flags

CHAIN = 32  # consecutive round trips, as in an iteration over 32 layers
TIMEOUT_S = 10.0  # per round trip, which takes microseconds
_HEADS, _HEAD_DIM = 16, 64  # 4 KiB of float32 per request
_ROW_BYTES = _HEADS * _HEAD_DIM * torch.float32.itemsize


class OffloadTimer:
    """Times round trips: q, k and v to the CPU, an output back; every request attends only to itself.

    Args:
        device: the model's.
        backend: runs programs on the device.
        in_graph: a relay attends within a graph; otherwise a thread does.
    """

    def __init__(self, device: torch.device, backend: Backend, *, in_graph: bool) -> None:
        self._device = device
        self._backend = backend
        self._in_graph = in_graph

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of one round trip with `nbytes` each way, without the attention itself.

        Raises:
            RelayStalledError, DeviceStalledError: no response within the timeout.
            StreamMemoryError: the driver refuses stream memory operations.
            RuntimeError: the output is not what was sent.
        """
        backend = self._backend
        backend.begin(Watchdog(TIMEOUT_S))
        try:
            with backend.on_device():
                return self._seconds(max(nbytes // _ROW_BYTES, 1))
        except BaseException as error:
            backend.abandon(error)
            raise
        finally:
            backend.forget()

    def _seconds(self, requests: int) -> float:
        device, pinned = self._device, self._device.type == "cuda"
        qkv = torch.zeros(requests, _HEADS + 2, _HEAD_DIM, device=device)
        out = torch.empty(requests, _HEADS, _HEAD_DIM, device=device)
        sent = torch.empty(qkv.shape, pin_memory=pinned)
        answer = torch.empty(out.shape, pin_memory=pinned)
        q, k, v = torch.split(sent, [_HEADS, 1, 1], dim=1)
        flags = empty_flags(CHAIN, pinned=pinned)
        attending_s = 0.0

        def attend(_: int) -> None:
            nonlocal attending_s
            started = time.perf_counter()
            answer.copy_(v)
            attending_s += time.perf_counter() - started

        trips = RoundTrips(
            flags,
            make=lambda: qkv.add_(1),
            send=lambda: sent.copy_(qkv, non_blocking=True),
            answer=attend,
            bring=lambda: out.copy_(answer, non_blocking=True),
        )
        cache = torch.zeros(requests, 1, 1, _HEAD_DIM)
        layer = RelayLayer(cache, cache.clone(), None, None, window=0)
        relay = Relay([layer] * CHAIN, block_size=1, scale=1.0)
        tables = torch.arange(requests, dtype=torch.int32).unsqueeze(1)
        batch = RelayBatch(q, k, v, answer, tables, torch.ones(requests, dtype=torch.int32), flags)
        for number in (1, 2, 3):  # in a graph: compiled, captured, launched
            attending_s = 0.0
            if self._in_graph:
                relay.start([batch], TIMEOUT_S)
            start = time.perf_counter()
            try:
                self._backend.start(
                    trips.program("offload"), with_flags=self._in_graph, with_graphs=self._in_graph
                )
                self._backend.wait()
            except BaseException:
                relay.cancel()
                raise
            taken_s = time.perf_counter() - start
            if self._in_graph:
                attending_s = sum(step.end_ns - step.start_ns for step in relay.finish()) / 1e9
            if not torch.equal(out.cpu(), torch.full(out.shape, float(number * CHAIN))):
                raise RuntimeError(
                    "a transfer between GPU and CPU lost data: the driver or the GPU is at fault"
                )
        return (taken_s - attending_s) / CHAIN

    def close(self) -> None:
        """Stop the backend's threads."""
        self._backend.close()
