"""What an iteration is put on: lanes, which carry out work in order, each beside the others."""

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
    """The lanes of an iteration. The drawing in `program` shows how they overlap."""

    DEVICE = "device"  # the model's: linear stages, and attention next to the device's KV
    TO_HOST = "to-host"  # q, k and v of decodes that the CPU attends for
    CPU = "cpu"  # their attention, and its rows of offloaded matrices
    TO_DEVICE = "to-device"  # its output
    STORE = "store"  # prompts' KV that leaves for host memory: the device's part
    SWAP = "swap"  # likewise of KV that comes from there, and of blocks that move
    WEIGHTS = "weights"  # rows of matrices that come from host memory for a product
    HOST_WEIGHTS = "host-weights"  # the host's part, where they are not pinned: to buffers that are
    SWAP_IN = "swap-in"  # KV that comes from host memory to be attended to on the device, a layer ahead
    SWAP_OUT = "swap-out"  # likewise: what is new of it, on its way back
    HOST_SWAP = "host-swap"  # the host's part: rows into its pages, and out of them


class Signal(Protocol):
    """The end of a piece of work."""

    def wait(self) -> None:
        """Block this thread until the work has ended; raise the work's exception if it failed."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on the stream from now on wait for the work; this thread waits only if it must."""
        ...


@dataclass(frozen=True, slots=True)
class HostStep:
    """Work of the CPU in one layer: done by a thread that calls it, or by a relay that is told by flags."""

    work: Work
    flags: Tensor | None  # [2, ints]: see `native.relay.empty_flags`, of the layer; None: always by a thread
    ask: Work | None = None  # that sends a worker what `work` takes the answer to; None: the CPU does it


class Launcher(Protocol):
    """Takes an iteration: what is given to a lane is carried out after all earlier work of that lane."""

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry `work` out after the signals."""
        ...

    def host(self, lane: str, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        """Let the CPU, or a worker whose lane it is, carry a step out after the signals."""
        ...

    def mark(self) -> Signal:
        """Return the end of everything that the device's lane has got so far."""
        ...

    def wait(self, signals: Sequence[Signal]) -> None:
        """Let what the device's lane gets from now on wait for the signals."""
        ...


class AnyLane(Protocol):
    """What carries out work in order. One thread submits, cancels and joins; any thread may close."""

    def begin(self, watch: Watchdog) -> None:
        """Take what is to be waited with from now on, while nothing is under way."""
        ...

    def cancel(self) -> None:
        """Drop what has not begun; its signals fail."""
        ...

    def join(self) -> None:
        """Block until everything has ended or was dropped; raise the first exception among it.

        Raises:
            EngineLostError: something did not end.
        """
        ...

    def stop(self) -> None:
        """Drop what has not begun and take no more; does not block."""
        ...

    def close(self) -> None:
        """Stop, and block until the lane has ended, if it does. May be called again."""
        ...


class WorkLane(AnyLane, Protocol):
    """A lane of work that is given as a call."""

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry `work` out after all earlier work of this lane and after the signals."""
        ...


class HostLane(AnyLane, Protocol):
    """A lane of the CPU's steps."""

    def submit_step(self, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        """Carry a step out after all earlier ones of this lane and after the signals."""
        ...
