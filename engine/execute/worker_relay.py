"""The relay of a worker: it lets a CUDA graph use a worker, like a native relay for the CPU.

    device  |linear 0|raises a flag|attention 0|linear 1|raises a flag|attention 1|waits|linear 0|..
    asks    |polls         |rows 0 to the worker| polls        |rows 1 to the worker| polls
    takes                                            |o 0 from the worker, raises a flag|o 1 ..

The GPU can access memory but no sockets. So one thread polls the flags that the GPU raises, and sends the
rows to the worker. Another thread receives the answers, and raises the flags that the GPU waits for (see
`WorkerLane`). So a whole iteration can be one graph.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from neo_desktop.engine.execute.lane import HostTask
from neo_desktop.engine.execute.worker import Worker, has_ended
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import DONE, READY, RelayStalledError, RelayStep

_END_TIMEOUT = 1.5  # in units of the watchdog's timeout: the asking thread waits for the GPU for 1


@dataclass
class _Iteration:
    tasks: Sequence[tuple[HostTask, Tensor]]  # with their flags
    watch: Watchdog
    asked: "SimpleQueue[tuple[int, int] | None]" = field(default_factory=SimpleQueue)  # layer, task's index
    steps: list[RelayStep] = field(default_factory=list)
    ends: list[Future[None]] = field(default_factory=list)  # ends of both threads' calls
    is_cancelled: bool = False

    def raise_all(self) -> None:
        """Raise all flags that the GPU may wait for."""
        for _, flags in self.tasks:
            flags[DONE, :, 0] = 1


class WorkerRelay:
    """Two threads that carry out a worker's steps after their flags have been raised.

    On every path, even after errors, all flags that the GPU may wait for are raised in the end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asks, self._takes = (Worker(f"neo-desktop-{name} {does}") for does in ("asks", "takes"))
        self._iteration: _Iteration | None = None  # the current iteration

    def start(self, tasks: Sequence[HostTask], watch: Watchdog) -> None:
        """Begin an iteration, before the device begins.

        Args:
            tasks: The worker's tasks, in the device's order within a layer.
        """
        with_flags = [(task, task.flags.zero_()) for task in tasks if task.flags is not None]
        self._iteration = begun = _Iteration(with_flags, watch)
        begun.ends += (self._asks.submit(partial(_ask, begun)), self._takes.submit(partial(_take, begun)))

    def finish(self) -> list[RelayStep]:
        """Wait for the iteration's end; return the times of its steps.

        Raises:
            RelayStalledError: A thread timed out.
            WorkerLostError: The worker does not answer.
            RuntimeError: The iteration was cancelled.
        """
        ended, self._iteration = self._iteration, None
        if ended is None:
            return []
        for end in ended.ends:
            if not ended.watch.wait_by(partial(has_ended, end), _END_TIMEOUT):
                raise RelayStalledError(f"{self._name} did not end its work {ended.watch.words}")
        for end in ended.ends:
            end.result()
        if ended.is_cancelled:
            raise RuntimeError("the iteration was cancelled")
        return ended.steps

    def cancel(self) -> None:
        """End all waits for the worker; it still answers outstanding requests."""
        iteration = self._iteration
        if iteration is not None:
            iteration.is_cancelled = True
            iteration.raise_all()

    def close(self) -> bool:
        """End the threads; return True if both have ended."""
        self.cancel()
        for thread in (self._asks, self._takes):
            thread.stop()
        have_ended = [thread.join(1.0) for thread in (self._asks, self._takes)]
        return all(have_ended)


@torch.inference_mode()
def _ask(iteration: _Iteration) -> None:
    """Send rows to the worker as the GPU provides them."""
    try:
        for layer in range(iteration.tasks[0][1].shape[1]):
            for number, (task, flags) in enumerate(iteration.tasks):
                if not _has_come(iteration, task, flags, layer):
                    return
                assert task.ask is not None
                task.ask(layer)
                iteration.asked.put((layer, number))
    finally:
        iteration.asked.put(None)


def _has_come(iteration: _Iteration, task: HostTask, flags: Tensor, layer: int) -> bool:
    """Wait until the GPU has raised a flag; return False if the iteration was cancelled."""
    watch, flag = iteration.watch, flags[READY, layer].numpy()
    if not watch.wait_until(lambda: iteration.is_cancelled or flag[0] == 1):
        raise RelayStalledError(f"the GPU did not come to {task.stage(layer).words} {watch.words}")
    return not iteration.is_cancelled


@torch.inference_mode()
def _take(iteration: _Iteration) -> None:
    """Receive the worker's answers in the same order."""
    try:
        while (asked := iteration.asked.get()) is not None:
            layer, number = asked
            (task, flags), start_ns = iteration.tasks[number], time.perf_counter_ns()
            task.run(layer)
            flags[DONE, layer, 0] = 1
            iteration.steps.append(RelayStep(layer, number, start_ns, time.perf_counter_ns()))
    finally:
        iteration.raise_all()
