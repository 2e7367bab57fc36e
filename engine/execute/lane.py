"""Lanes: queues that carry out an iteration's work in order, and in parallel to each other."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import HostTask as NativeTask

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
    EXPERTS = "experts"  # experts that move to slots on the device.
    HOST_SWAP = "host-swap"  # the host's part of STORE and SWAP: rows into and out of pages.


class Signal(Protocol):
    """The end of a piece of work."""

    def wait(self) -> None:
        """Block this thread until the work has ended; raise the work's exception if it failed."""

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work on the stream wait for this work; block this thread only if necessary."""


@dataclass(eq=False)
class HostTask:
    """A piece of the CPU's or a worker's work, with a step per layer or turn of an iteration.

    A thread runs its steps one by one, or a relay does when flags say so.
    """

    lane: str  # a lane of the CPU, or a worker's own lane
    stage: Callable[[int], Stage]  # layer or turn -> its stage, for timelines and messages
    run: Callable[[int], object]  # does a step; for a worker, takes the answer
    flags: Tensor | None = None  # see `native.relay.empty_flags`; None: always a thread
    ask: Callable[[int], object] | None = None  # sends a step's request to a worker; None: CPU work
    native: NativeTask | None = None  # the same work for relays; None: work of a worker
    is_awaited: bool = False  # True if the iteration waits for it as attention
    busy_ns: int = 0  # time, summed over steps

    @classmethod
    def of(
        cls, task: NativeTask, lane: Lane, name: str, index: int, rows: int, *, is_awaited: bool = False
    ) -> Self:
        """Make a task of the CPU; `name`, `index` of the sub-batch and `rows` describe its stages."""
        stage = partial(Stage, name, sub_batch=index, tokens=rows)
        return cls(lane, stage, task.run, task.flags, native=task, is_awaited=is_awaited)

    def step(self, turn: int) -> None:
        """Do and time a step."""
        started_ns = time.perf_counter_ns()
        self.run(turn)
        self.busy_ns += time.perf_counter_ns() - started_ns


class Launcher(Protocol):
    """The receiver of an iteration's work; each lane carries out its work in order of submission."""

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after the signals."""

    def host(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        """Do a step of a task on its lane, after the signals."""

    def mark(self) -> Signal:
        """Return a signal for the end of the device lane's work so far."""

    def wait(self, signals: Sequence[Signal]) -> None:
        """Make later work on the device's lane wait for the signals."""


class Step(NamedTuple):
    """Work of an iteration that a backend submits to lanes, or captures in a graph.

    Signals do not cross between capturable and other steps: all work passes the device's lane in between.
    """

    submit: Callable[[Launcher], object]
    is_capturable: bool = True  # False: it depends on more than the sizes of the iteration


def device_step(stage: Stage, work: Work, *, is_capturable: bool = True) -> Step:
    """Return a step of the device alone."""
    return Step(lambda launcher: launcher.run(Lane.DEVICE, stage, work), is_capturable)


class AnyLane:
    """A queue of work. One thread submits, cancels and joins; any thread may close. The base does nothing."""

    def begin(self, watch: Watchdog) -> None:
        """Set the watchdog for the next iteration. The lane must be idle."""

    def cancel(self) -> None:
        """Drop work that has not begun; its signals fail."""

    def join(self) -> None:
        """Block until all work has ended or was dropped; raise the first exception of the work.

        Raises:
            EngineLostError: Some work did not end.
        """

    def stop(self) -> None:
        """Drop work that has not begun and accept no more; does not block."""

    def close(self) -> None:
        """Stop, and block until the lane has ended or timed out. May be called again."""


class WorkLane(AnyLane, ABC):
    """A lane of callables."""

    @abstractmethod
    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after all earlier work of this lane and after the signals."""


class HostLane(AnyLane, ABC):
    """A lane of the CPU's tasks."""

    @abstractmethod
    def submit_step(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        """Do a step after all earlier steps of this lane and after the signals."""
