"""Lanes: each carries out its tasks in order, beside the others.

A task may wait for tasks of other lanes, through the signals that `submit` returned for them. A signal exists
only once its task was submitted: tasks can wait for earlier ones alone, so they never wait in a circle.

Where there is a GPU, transfers are CUDA streams (`StreamLane`); where there is none, threads that do real
copies stand in for them (`ThreadLane`), so that a task in a wrong order shows as wrong tokens on any machine.
CPU attention and swapping are threads everywhere.

A failed task fails its signal with the exception, and so does every task that waits for it, without running.

Nobody waits for ever. When no stage of any lane has ended for longer than an iteration's patience, waiting
ends with an error that names the stage. It means that nothing more can be computed in this process: neither a
thread nor the GPU can be made to give a stage up, so that its lane, and the memory it works on, stay lost.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

import torch

from neo_desktop.engine.cuda.errors import DeviceLostError, EngineLostError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.execute.lane import Lane, Signal, Work
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Stage, Timeline, timed_event
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Watch


class _Event:
    """The signal of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, watch: Watch, what: str) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._watch = watch
        self._what = what

    def wait(self) -> None:
        wait_for_gpu(self._event, self._watch, self._what)
        self._watch.went_on()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class _Done:
    """The signal of work that has ended."""

    def wait(self) -> None:
        pass

    def hold(self, stream: torch.cuda.Stream) -> None:
        pass


_DONE = _Done()


class StreamLane:
    """A CUDA stream, filled by the thread that submits; work must not block."""

    def __init__(self, name: str, timeline: Timeline | None, stream: torch.cuda.Stream) -> None:
        self.name = name
        self._timeline = timeline
        self._stream = stream
        self._watch = DEFAULT_PATIENCE.watch()
        self._passed: list[_Event] = []  # of the iteration

    def begin(self, watch: Watch) -> None:
        """See `Lane`."""
        self._watch = watch
        self._passed.clear()

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Put `work` on the stream; blocks until those of the signals that come from threads have come."""
        for signal in after:
            signal.hold(self._stream)
        with torch.cuda.stream(self._stream), _timed(self.name, self._timeline, stage):
            work()
        self._passed.append(event := _Event(self._stream, self._watch, stage.words))
        return event

    def cancel(self) -> None:
        """Do nothing: what is on a stream cannot be taken back, and ends by itself."""

    def join(self) -> None:
        """Block until the stream is empty."""
        _wait_for_all(self._passed)
        wait_for_gpu(self._stream, self._watch)

    def stop(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Block until the stream is empty, unless the GPU is lost."""
        with suppress(RuntimeError):  # whoever waits for what is on it is told
            wait_for_gpu(self._stream, self._watch)


class CallerLane:
    """The thread that carries out the plan: on a GPU it fills the current stream, else it computes itself."""

    def __init__(self, name: str, timeline: Timeline | None, device: torch.device) -> None:
        self.name = name
        self._timeline = timeline
        self._device = device
        self._watch = DEFAULT_PATIENCE.watch()
        self._passed: list[_Event] = []  # of the iteration

    def begin(self, watch: Watch) -> None:
        """Take what is to be waited with from now on, while nothing is under way."""
        self._watch = watch
        self._passed.clear()

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
        return _DONE if stream is None else _Event(stream, self._watch, "what comes before a copy")

    @contextmanager
    def span(self, stage: Stage) -> Iterator[None]:
        """Carry out the block of the `with` statement as a stage, and record it."""
        stream, timeline = self._stream, self._timeline
        if stream is not None:
            with _timed(self.name, timeline, stage):
                yield
            self._passed.append(_Event(stream, self._watch, stage.words))
            return
        start_ns = time.perf_counter_ns()
        yield
        self._watch.went_on()
        if timeline is not None and timeline.is_recording:
            timeline.add(self.name, stage, start_ns, time.perf_counter_ns())

    def join(self) -> None:
        """Block until the device is done."""
        if (stream := self._stream) is not None:
            _wait_for_all(self._passed)
            wait_for_gpu(stream, self._watch)


def _wait_for_all(events: list[_Event]) -> None:
    """Wait for stages in order, so that an error names the one that does not end."""
    for event in events:
        event.wait()
    events.clear()


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

    def begin(self, watch: Watch) -> None:
        """Begin an iteration, which is waited for in this way."""
        for lane in self._beside:
            lane.begin(watch)
        self.device.begin(watch)

    def join(self) -> None:
        """Block until all work has ended; raise the exception of a task that failed.

        Raises:
            EngineLostError: a stage did not end.
        """
        for lane in self._beside:
            lane.join()
        self.device.join()

    def abandon(self, error: BaseException | None = None) -> EngineLostError | None:
        """Drop what has not begun and block until the rest has ended, whether or not it fails.

        Args:
            error: that led here, if one did.

        Returns:
            Why nothing can be done any more: it, or what does not end now; None: all can be used again.
        """
        for lane in self._beside:
            lane.cancel()
        lost = error if isinstance(error, EngineLostError) else None
        for join in (*(lane.join for lane in self._beside), self.device.join):
            if isinstance(lost, DeviceLostError):
                break  # threads wait for it in vain, too
            try:
                join()
            except EngineLostError as another:
                lost = lost or another
            except Exception:
                pass
        return lost

    def close(self) -> None:
        """End all threads, also in the middle of an iteration. May be called again, from any thread."""
        for lane in self._beside:  # first all: a task may wait for another lane's
            lane.stop()
        for lane in self._beside:
            lane.close()
