"""A lane on a thread."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

import torch

from neo_desktop.engine.cuda.errors import StageStalledError
from neo_desktop.engine.execute.lane import HostLane, HostTask, Signal, Work, WorkLane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.execute.worker import Worker, has_ended
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog

logger = logging.getLogger(__name__)

# Waits for a thread last longer than the thread's own waits for the GPU, whose error is more specific.
_THREADS_SHARE = 1.5


class _Task:
    """The signal of a thread's task."""

    def __init__(self, future: Future[None], lane: "ThreadLane") -> None:
        self._future = future
        self._lane = lane

    def wait(self) -> None:
        self._lane.wait_for(self._future)
        self._future.result()

    def hold(self, stream: torch.cuda.Stream) -> None:
        # A stream cannot wait for a thread, so the submitting thread waits instead.
        self.wait()


class ThreadLane(WorkLane, HostLane):
    """A lane on a thread, which exists from the first task until `close` and sleeps without tasks."""

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = str(name)
        self._timeline = timeline
        self._worker = Worker(f"neo-desktop-{name}")
        self._tasks: list[Future[None]] = []
        self._watch = DEFAULT_TIMEOUT.watch()

    def begin(self, watch: Watchdog) -> None:
        self._watch = watch

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        future = self._worker.submit(partial(self._run, stage, work, after, self._watch))
        self._tasks.append(future)
        return _Task(future, self)

    def submit_step(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        return self.submit(task.stage(turn), partial(task.step, turn), after)

    def _run(self, stage: Stage, work: Work, after: Sequence[Signal], watch: Watchdog) -> None:
        for signal in after:
            signal.wait()
        start_ns = time.perf_counter_ns()
        watch.began(self.name, stage.words)
        with torch.inference_mode():  # the mode is per thread
            try:
                work()
            finally:
                watch.ended(self.name)
        if self._timeline is not None and self._timeline.is_recording:
            self._timeline.add(self.name, stage, start_ns, time.perf_counter_ns())

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def join(self) -> None:
        tasks, self._tasks = self._tasks, []
        errors = [self._error(task) for task in tasks]
        for error in errors:
            if error is not None:
                raise error

    def wait_for(self, task: Future[None]) -> None:
        """Block until a task has ended, failed or been cancelled.

        Raises:
            StageStalledError: The task did not end within the timeout.
        """
        watch = self._watch
        if task.done() or watch.wait_by(partial(has_ended, task), _THREADS_SHARE):
            return
        watch.give_up()
        raise StageStalledError(
            f"the CPU did not end {watch.under_way} {watch.words}; a thread cannot be stopped, and the "
            "engine must be started again"
        )

    def _error(self, task: Future[None]) -> BaseException | None:
        try:
            self.wait_for(task)
            return task.exception()
        except (CancelledError, StageStalledError) as error:
            return error

    def stop(self) -> None:
        self._worker.stop()

    def close(self) -> None:
        self._worker.stop()
        if not self._worker.join(1.0 if self._watch.is_given_up else self._watch.timeout_s):
            logger.error("the thread %s does not end, and is left behind", self.name)
