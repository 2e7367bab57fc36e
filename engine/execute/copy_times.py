"""How long copies to the window take, and how long the device waits for them: without a synchronisation."""

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from neo_desktop.engine.execute.lane import Lane, Launcher, Work
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage, timed_event


class Mark(Protocol):
    """A moment: of a stream, where there is a GPU, else of the thread that records it."""

    def record(self) -> None:
        """It is now."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds until another one; negative if that was before."""


class _Moment:
    def __init__(self) -> None:
        self._ns = 0

    def record(self) -> None:
        self._ns = time.perf_counter_ns()

    def elapsed_time(self, end: "_Moment") -> float:
        return (end._ns - self._ns) / 1e6


class CopyTimes:
    """Marks around the copies of layers: kept for all iterations, since graphs record them, too.

    Args:
        layers: whose KV is copied.
        device: there.
    """

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        def mark() -> Mark:
            return timed_event(in_graph=True) if device.type == "cuda" else _Moment()

        # By layer: its copy begins and ends, and the device has nothing left to do but what needs it.
        self._marks = {layer: (mark(), mark(), mark()) for layer in layers}

    def around(self, layer: int, copy: Work) -> None:
        """Carry out a copy."""
        begins, ends, _ = self._marks[layer]
        begins.record()
        copy()
        ends.record()

    def wanted(self, launcher: Launcher, layer: int) -> None:
        """Note that the device comes to wait for a layer."""
        launcher.run(
            Lane.DEVICE, Stage("wait for a copy", layer, NO_SUB_BATCH, 0), self._marks[layer][2].record
        )

    def read(self) -> tuple[float, float]:
        """Return the ms that the copies of an iteration took that has ended, and the waits for them."""
        copies_ms = waits_ms = 0.0
        for begins, ends, wanted in self._marks.values():
            copies_ms += begins.elapsed_time(ends)
            waits_ms += max(wanted.elapsed_time(ends), 0.0)
        return copies_ms, waits_ms
