"""Lanes that are CUDA streams, and the CPU's lanes that streams tell by flags."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop.engine.cuda.driver import stream_wait_value, stream_write_value
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.execute.lane import HostStep, Signal, Work
from neo_desktop.engine.execute.timeline import Stage, TimedEvents, Timeline, timed_event
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog
from neo_desktop.native.relay import DONE, READY

# In units of a watch's. Relays' guards have one: they come first, and raise the flags that the GPU waits for.
TIMEOUT_WITH_RELAYS = 2.0


@dataclass(slots=True)
class Tape:
    """Whether what lanes get now becomes a graph, and when its stages run."""

    is_capturing: bool = False
    is_timed: bool = False
    number: int = 0  # of the graph
    spans: list[TimedEvents] = field(default_factory=list)


class _Event:
    """The signal of a CUDA stream."""

    def __init__(self, lane: "StreamLane", tape: Tape, watch: Watchdog, what: str) -> None:
        self._event: torch.cuda.Event = lane.stream.record_event()
        self._graph = tape.number if tape.is_capturing else None
        self._tape = tape
        self._watch = watch
        self._what = what
        self._timeout = lane.timeout

    def wait(self) -> None:
        wait_for_gpu(self._event, self._watch, self._what, self._timeout)
        self._watch.tick()

    def hold(self, stream: torch.cuda.Stream) -> None:
        # All of an earlier graph comes before what follows it on the device's stream.
        if self._graph is None or self._graph == self._tape.number:
            stream.wait_event(self._event)


class StreamLane:
    """A CUDA stream, filled by the thread that submits; work must not block.

    Args:
        name: of the lane.
        timeline: records when the lane was busy.
        stream: a stream of its own.
        tape: what captures write to.
        timeout: in units of the iteration's.
    """

    def __init__(
        self,
        name: str,
        timeline: Timeline | None,
        stream: torch.cuda.Stream,
        tape: Tape,
        timeout: float = 1.0,
    ) -> None:
        self.timeout = timeout
        self.name = str(name)
        self.stream = stream
        self._timeline = timeline
        self._tape = tape
        self._watch = DEFAULT_TIMEOUT.watch()
        self._passed: list[_Event] = []  # of the iteration

    def begin(self, watch: Watchdog) -> None:
        self._watch = watch
        self._passed = []

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Put `work` on the stream; blocks until those of the signals that come from threads have come."""
        self.wait(after)
        with torch.cuda.stream(self.stream), self._timed(stage):
            work()
        event = _Event(self, self._tape, self._watch, stage.words)
        if not self._tape.is_capturing:
            self._passed.append(event)
        return event

    def mark(self, what: str) -> _Event:
        """Return the end of everything up to here, by this name for people."""
        return _Event(self, self._tape, self._watch, what)

    def take_passed(self) -> list[_Event]:
        """Return the ends of the iteration's stages so far, and forget them."""
        passed, self._passed = self._passed, []
        return passed

    def wait(self, signals: Sequence[Signal]) -> None:
        """Let what follows wait for the signals."""
        for signal in signals:
            signal.hold(self.stream)

    def cancel(self) -> None:
        """Do nothing: what is on a stream cannot be taken back, and ends by itself."""

    def join(self) -> None:
        """Block until the stream is empty."""
        for event in self._passed:  # in order, so that an error names the one that does not end
            event.wait()
        self._passed.clear()
        wait_for_gpu(self.stream, self._watch, f"what is on its stream {self.name!r}", self.timeout)

    def stop(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Block until the stream is empty, unless the GPU is lost."""
        with suppress(RuntimeError):  # raised where the work on it is waited for
            wait_for_gpu(self.stream, self._watch)

    @contextmanager
    def _timed(self, stage: Stage) -> Iterator[None]:
        """Record what the block puts on the current stream."""
        tape, timeline = self._tape, self._timeline
        is_timed = tape.is_timed if tape.is_capturing else timeline is not None and timeline.is_recording
        if not is_timed:
            yield
            return
        start, end = (timed_event(in_graph=tape.is_capturing) for _ in range(2))
        start.record()
        yield
        end.record()
        if tape.is_capturing:
            tape.spans.append(TimedEvents(self.name, stage, start, end))
        elif timeline is not None:
            timeline.add_events(self.name, stage, start, end)


class _Flag:
    """The signal of a relay's step."""

    def __init__(self, raised: _Event, done: Tensor, what: str) -> None:
        self._raised = raised
        self._done = done
        self._what = what

    def wait(self) -> None:
        raise AssertionError(f"only streams wait for relays: {self._what}")

    def hold(self, stream: torch.cuda.Stream) -> None:
        # CUDA may put several streams, or nodes of a graph, into one hardware queue. It must know of every
        # order that a wait relies on: without it the wait may come to stand before what makes the host act.
        self._raised.hold(stream)
        stream_wait_value(stream, self._done)


class RelayLane:
    """Work of the CPU that a relay does, once a flag is raised.

    Args:
        told_by: the lane whose stream raises the flags.
    """

    def __init__(self, told_by: StreamLane) -> None:
        self._told_by = told_by

    def begin(self, watch: Watchdog) -> None:
        """Do nothing: the relay's owner sets its timeout."""

    def submit_step(self, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        """Raise the step's flag after the signals."""
        assert step.flags is not None
        self._told_by.wait(after)
        stream_write_value(self._told_by.stream, step.flags[READY, :1])
        return _Flag(self._told_by.mark("the raise of a flag"), step.flags[DONE, :1], stage.words)

    def cancel(self) -> None:
        """Do nothing: the relay's owner cancels it."""

    def join(self) -> None:
        """Do nothing, likewise."""

    def stop(self) -> None:
        """Do nothing, likewise."""

    def close(self) -> None:
        """Do nothing, likewise."""
