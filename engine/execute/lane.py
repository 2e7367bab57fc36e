"""Lanes: queues that carry out an iteration's work in order, and in parallel to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.watchdog import Watchdog

Work = Callable[[], object]


class Lane(StrEnum):
    """The lanes of an iteration. The drawing in `program` shows their overlap."""

    DEVICE = "device"  # the model's device: linear stages, and attention over the device's KV.
    TO_HOST = "to-host"  # q, k and v of decodes with CPU attention.
    CPU = "cpu"  # CPU attention, and the CPU's rows of offloaded matmuls.
    TO_DEVICE = "to-device"  # the output of CPU attention.
    STORE = "store"  # the device's part of storing prompts' KV in host memory.
    SWAP = "swap"  # the device's part of loading KV from host memory, and of moving blocks.
    WEIGHTS = "weights"  # rows of offloaded matrices from host memory to the device.
    HOST_WEIGHTS = "host-weights"  # copies of pageable weights to pinned buffers on the host.
    SWAP_IN = "swap-in"  # streamed KV from host memory to the device, one layer ahead.
    SWAP_OUT = "swap-out"  # new rows of streamed KV, back to host memory.
    HOST_SWAP = "host-swap"  # the host's part of STORE and SWAP: rows into and out of pages.


class Signal(Protocol):
    """The end of a piece of work."""

    def wait(self) -> None:
        """Block this thread until the work has ended; raise the work's exception if it failed."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work on the stream wait for this work; block this thread only if necessary."""
        ...


@dataclass(frozen=True, slots=True)
class HostStep:
    """The CPU's work in one layer: a thread calls it, or flags start it on a relay."""

    work: Work
    flags: Tensor | None  # [2, ints], the layer's part of `native.relay.empty_flags`; None: always a thread
    ask: Work | None = None  # sends a request to a worker; `work` then takes the answer. None: CPU work


class Launcher(Protocol):
    """The receiver of an iteration's work; each lane carries out its work in order of submission."""

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after the signals."""
        ...

    def host(self, lane: str, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        """Carry out a step on the CPU, or on a worker if the lane is a worker's, after the signals."""
        ...

    def mark(self) -> Signal:
        """Return a signal for the end of the device lane's work so far."""
        ...

    def wait(self, signals: Sequence[Signal]) -> None:
        """Make later work on the device's lane wait for the signals."""
        ...


class AnyLane(Protocol):
    """A queue of work. One thread submits, cancels and joins; any thread may close."""

    def begin(self, watch: Watchdog) -> None:
        """Set the watchdog for the next iteration. The lane must be idle."""
        ...

    def cancel(self) -> None:
        """Drop work that has not begun; its signals fail."""
        ...

    def join(self) -> None:
        """Block until all work has ended or was dropped; raise the first exception of the work.

        Raises:
            EngineLostError: Some work did not end.
        """
        ...

    def stop(self) -> None:
        """Drop work that has not begun and accept no more; does not block."""
        ...

    def close(self) -> None:
        """Stop, and block until the lane has ended or timed out. May be called again."""
        ...


class WorkLane(AnyLane, Protocol):
    """A lane of callables."""

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after all earlier work of this lane and after the signals."""
        ...


class HostLane(AnyLane, Protocol):
    """A lane of the CPU's steps."""

    def submit_step(self, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        """Carry out a step after all earlier steps of this lane and after the signals."""
        ...
