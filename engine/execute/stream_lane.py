"""Lanes on CUDA streams, and the CPU's lanes that streams start by flags."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import wait_for_gpu
from neo_desktop.engine.cuda.driver import stream_wait_value, stream_write_value
from neo_desktop.engine.execute.lane import HostLane, HostTask, Signal, Work, WorkLane
from neo_desktop.engine.execute.timeline import Stage, TimedEvents, Timeline, timed_event
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog
from neo_desktop.native.relay import DONE, READY

# In units of the watchdog's timeout. Relays have a timeout of 1: they time out first, and raise the flags
# that the GPU waits for.
TIMEOUT_WITH_RELAYS = 2.0


@dataclass(slots=True)
class Tape:
    """State of a graph capture, and the timed events in the graph."""

    is_capturing: bool = False
    is_timed: bool = False
    number: int = 0  # incremented when a capture starts or ends
    spans: list[TimedEvents] = field(default_factory=list)


class _Event:
    """The signal of work on a CUDA stream."""

    def __init__(self, lane: "StreamLane", tape: Tape, watch: Watchdog, what: str) -> None:
        self._event: torch.cuda.Event = lane.stream.record_event()
        self._graph = tape.number if tape.is_capturing else None
        self._tape = tape
        self._watch = watch
        self._what = what
        self._timeout = lane.timeout

    def wait(self) -> None:
        wait_for_gpu(self._event.query, self._watch, self._what, self._timeout)
        self._watch.tick()

    def hold(self, stream: torch.cuda.Stream) -> None:
        # An earlier graph has joined the device's stream, so later work follows it without this event.
        if self._graph is None or self._graph == self._tape.number:
            stream.wait_event(self._event)


class StreamLane(WorkLane):
    """A lane on a CUDA stream; the submitting thread launches the work, which must not block.

    Submitted work cannot be cancelled, and ends by itself.

    Args:
        timeout: Timeout in units of the watchdog's.
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
        self._passed: list[_Event] = []  # ends of the iteration's stages

    def begin(self, watch: Watchdog) -> None:
        self._watch = watch
        self._passed = []

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Launch `work` on the stream; block first for those signals that come from threads."""
        self.wait(after)
        with torch.cuda.stream(self.stream), self._timed(stage):
            work()
        event = _Event(self, self._tape, self._watch, stage.words)
        if not self._tape.is_capturing:
            self._passed.append(event)
        return event

    def mark(self, what: str) -> _Event:
        """Return a signal for the end of the work so far; `what` names the work in messages."""
        return _Event(self, self._tape, self._watch, what)

    def take_passed(self) -> list[_Event]:
        """Return and clear the end signals of the iteration's stages so far."""
        passed, self._passed = self._passed, []
        return passed

    def wait(self, signals: Sequence[Signal]) -> None:
        """Make later work on the stream wait for the signals."""
        for signal in signals:
            signal.hold(self.stream)

    def join(self) -> None:
        """Block until the stream is empty."""
        for event in self._passed:  # in order, so that an error names the stalled stage
            event.wait()
        self._passed.clear()
        wait_for_gpu(self.stream.query, self._watch, f"what is on its stream {self.name!r}", self.timeout)

    def close(self) -> None:
        """Block until the stream is empty, unless the GPU is lost."""
        with suppress(RuntimeError):  # waits for the work raise this error
            wait_for_gpu(self.stream.query, self._watch)

    @contextmanager
    def _timed(self, stage: Stage) -> Iterator[None]:
        """Time the block's work on the current stream."""
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
        # CUDA may map several streams, or nodes of a graph, to one hardware queue, so it must know every
        # dependency of a wait. Otherwise the wait could precede the write that starts the host's work.
        self._raised.hold(stream)
        stream_wait_value(stream, self._done)


class RelayLane(HostLane):
    """A CPU lane whose work a relay does after a flag is raised. The relay's owner cancels and closes it.

    Args:
        told_by: The lane whose stream raises the flags.
    """

    def __init__(self, told_by: StreamLane) -> None:
        self._told_by = told_by

    def submit_step(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        """Raise the step's flag after the signals."""
        assert task.flags is not None
        self._told_by.wait(after)
        stream_write_value(self._told_by.stream, task.flags[READY, turn, :1])
        raised = self._told_by.mark("the raise of a flag")
        return _Flag(raised, task.flags[DONE, turn, :1], task.stage(turn).words)
