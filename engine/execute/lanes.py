"""Lanes: each carries out its tasks in order, beside the others.

A task may wait for tasks of other lanes, through the signals that `submit` returned for them. A signal exists
only once its task was submitted: tasks can wait for earlier ones alone, so they never wait in a circle.

Where there is a GPU, transfers are CUDA streams (`StreamLane`); where there is none, threads that do real
copies stand in for them (`ThreadLane`), so that a task in a wrong order shows as wrong tokens on any machine.
CPU attention and swapping are threads everywhere.

A failed task fails its signal with the exception, and so does every task that waits for it, without running.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.timeline import Stage, Timeline, timed_event

Work = Callable[[], object]


class Signal(Protocol):
    """The end of a piece of work."""

    def wait(self) -> None:
        """Block this thread until the work has ended; raise the work's exception if it failed."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on the stream from now on wait for the work; this thread waits only if it must."""
        ...


class _Task:
    """The signal of a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def hold(self, stream: torch.cuda.Stream) -> None:
        # A stream cannot wait for a thread: whoever fills the stream does it in its place.
        self.wait()


class _Event:
    """The signal of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class _Done:
    """The signal of work that has ended."""

    def wait(self) -> None:
        pass

    def hold(self, stream: torch.cuda.Stream) -> None:
        pass


_DONE = _Done()


class Lane(Protocol):
    """What carries out tasks in order. One thread submits, cancels and joins; any thread may close."""

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after all earlier tasks of this lane and after the signals."""
        ...

    def cancel(self) -> None:
        """Drop the tasks that have not begun; their signals fail."""
        ...

    def join(self) -> None:
        """Block until every task has ended or was dropped; raise the first exception among them."""
        ...

    def stop(self) -> None:
        """Drop the tasks that have not begun and take no more; does not block."""
        ...

    def close(self) -> None:
        """Stop, and block until the lane has ended. May be called again."""
        ...


class ThreadLane:
    """A thread. It exists from the first task until `close`, and sleeps while there are no tasks.

    Args:
        name: of the lane and its thread.
        timeline: records when the lane was busy.
        stream: the CUDA stream on which tasks put their work, if they use the GPU; a task has ended when
            that work has.
    """

    def __init__(
        self, name: str, timeline: Timeline | None = None, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.name = name
        self._timeline = timeline
        self._stream = stream
        # Its thread also ends when the lane is garbage, and before the interpreter does.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"neo-desktop-{name}")
        self._tasks: list[Future[None]] = []

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after all earlier tasks of this lane and after the signals."""
        future = self._thread.submit(self._run, stage, work, after)
        self._tasks.append(future)
        return _Task(future)

    def _run(self, stage: Stage, work: Work, after: Sequence[Signal]) -> None:
        for signal in after:
            signal.wait()
        start_ns = time.perf_counter_ns()
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:  # both belong to the thread
            try:
                work()
            finally:
                if self._stream is not None:
                    self._stream.synchronize()
        if self._timeline is not None and self._timeline.is_recording:
            self._timeline.add(self.name, stage, start_ns, time.perf_counter_ns())

    def cancel(self) -> None:
        """Drop the tasks that have not begun; their signals fail."""
        for task in self._tasks:
            task.cancel()

    def join(self) -> None:
        """Block until every task has ended or was dropped; raise the first exception among them."""
        tasks, self._tasks = self._tasks, []
        errors = [_error(task) for task in tasks]
        for error in errors:
            if error is not None:
                raise error

    def stop(self) -> None:
        """Drop the tasks that have not begun and take no more; does not block."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop, and block until the thread has ended. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _error(task: Future[None]) -> BaseException | None:
    try:
        return task.exception()
    except CancelledError as error:
        return error


class StreamLane:
    """A CUDA stream, filled by the thread that submits; work must not block."""

    def __init__(self, name: str, timeline: Timeline | None, stream: torch.cuda.Stream) -> None:
        self.name = name
        self._timeline = timeline
        self._stream = stream

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Put `work` on the stream; blocks until those of the signals that come from threads have come."""
        for signal in after:
            signal.hold(self._stream)
        with torch.cuda.stream(self._stream), _timed(self.name, self._timeline, stage):
            work()
        return _Event(self._stream)

    def cancel(self) -> None:
        """Do nothing: what is on a stream cannot be taken back, and ends by itself."""

    def join(self) -> None:
        """Block until the stream is empty."""
        self._stream.synchronize()

    def stop(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class CallerLane:
    """The thread that carries out the plan: on a GPU it fills the current stream, else it computes itself."""

    def __init__(self, name: str, timeline: Timeline | None, device: torch.device) -> None:
        self.name = name
        self._timeline = timeline
        self._device = device

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def wait(self, *signals: Signal) -> None:
        """Let what follows wait for the signals."""
        stream = self._stream
        for signal in signals:
            if stream is None:
                signal.wait()
            else:
                signal.hold(stream)

    def mark(self) -> Signal:
        """Return the signal of everything up to here."""
        stream = self._stream
        return _DONE if stream is None else _Event(stream)

    def span(self, stage: Stage) -> AbstractContextManager[None]:
        """Record the block of the `with` statement."""
        if self._timeline is None or not self._timeline.is_recording:
            return nullcontext()
        if self._stream is None:
            return _clocked(self.name, self._timeline, stage)
        return _timed(self.name, self._timeline, stage)

    def join(self) -> None:
        """Block until the device is done."""
        if (stream := self._stream) is not None:
            stream.synchronize()


@contextmanager
def _clocked(lane: str, timeline: Timeline, stage: Stage) -> Iterator[None]:
    start_ns = time.perf_counter_ns()
    yield
    timeline.add(lane, stage, start_ns, time.perf_counter_ns())


@contextmanager
def _timed(lane: str, timeline: Timeline | None, stage: Stage) -> Iterator[None]:
    """Record what the block puts on the current stream."""
    if timeline is None or not timeline.is_recording:
        yield
        return
    start, end = timed_event(), timed_event()
    start.record()
    yield
    end.record()
    timeline.add_events(lane, stage, start, end)


@dataclass(frozen=True, slots=True)
class Lanes:
    """All lanes of an executor; `device` is the thread that calls it."""

    device: CallerLane
    to_host: Lane  # q, k and v of decodes whose KV is in host memory
    cpu: Lane  # their attention
    to_device: Lane  # its output
    swap: Lane  # KV that changes its place

    @classmethod
    def for_device(cls, streams: Streams, timeline: Timeline | None) -> Self:
        """Make the lanes for a model on the device of these streams."""
        device = streams.device
        is_cuda = device.type == "cuda"

        def transfer(name: str) -> Lane:
            if is_cuda:
                return StreamLane(name, timeline, streams.stream())
            return ThreadLane(name, timeline)

        return cls(
            device=CallerLane("device", timeline, device),
            to_host=transfer("to-host"),
            cpu=ThreadLane("cpu", timeline),
            to_device=transfer("to-device"),
            swap=ThreadLane("swap", timeline, streams.stream() if is_cuda else None),
        )

    @property
    def _beside(self) -> tuple[Lane, ...]:
        return self.to_host, self.cpu, self.to_device, self.swap

    def join(self) -> None:
        """Block until all work has ended; raise the exception of a task that failed."""
        for lane in self._beside:
            lane.join()
        self.device.join()

    def abandon(self) -> None:
        """Drop what has not begun and block until the rest has ended, whether or not it fails."""
        for lane in self._beside:
            lane.cancel()
        for join in (*(lane.join for lane in self._beside), self.device.join):
            with suppress(Exception):  # the one that led here is reported
                join()

    def close(self) -> None:
        """End all threads, also in the middle of an iteration. May be called again, from any thread."""
        for lane in self._beside:  # first all: a task may wait for another lane's
            lane.stop()
        for lane in self._beside:
            lane.close()
