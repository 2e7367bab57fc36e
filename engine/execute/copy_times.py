"""Times of copies to the prefetch buffer, and of the device's waits for them, without synchronisation."""

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from neo_desktop.engine.execute.lane import Lane, Launcher, Work
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage, timed_event


class Mark(Protocol):
    """A timestamp on a GPU's stream; without a GPU, on the recording thread."""

    def record(self) -> None:
        """Record the current time."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds until `end`; negative if `end` is earlier."""


class _Moment:
    def __init__(self) -> None:
        self._ns = 0

    def record(self) -> None:
        self._ns = time.perf_counter_ns()

    def elapsed_time(self, end: "_Moment") -> float:
        return (end._ns - self._ns) / 1e6


class CopyTimes:
    """Marks around the copies of layers, kept for all iterations because graphs record them.

    Args:
        layers: Layers with streamed KV.
        device: Target of the copies.
    """

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        def mark() -> Mark:
            return timed_event(in_graph=True) if device.type == "cuda" else _Moment()

        # layer -> start of its copy, end of its copy, and start of the device's wait for the copy.
        self._marks = {layer: (mark(), mark(), mark()) for layer in layers}

    def around(self, layer: int, copy: Work) -> None:
        """Carry out and time a copy."""
        begins, ends, _ = self._marks[layer]
        begins.record()
        copy()
        ends.record()

    def wanted(self, launcher: Launcher, layer: int) -> None:
        """Mark the point where the device starts to wait for a layer's copy."""
        launcher.run(
            Lane.DEVICE, Stage("wait for a copy", layer, NO_SUB_BATCH, 0), self._marks[layer][2].record
        )

    def read(self) -> tuple[float, float]:
        """Return the ms of the last finished iteration's copies, and of the waits for them."""
        copies_ms = waits_ms = 0.0
        for begins, ends, wanted in self._marks.values():
            copies_ms += begins.elapsed_time(ends)
            waits_ms += max(wanted.elapsed_time(ends), 0.0)
        return copies_ms, waits_ms
