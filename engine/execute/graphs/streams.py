"""Lanes as CUDA streams: work is put on them at once, or captured as a graph and launched from then on."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.engine.cuda.driver import stream_wait_value, stream_write_value
from neo_desktop.engine.cuda.errors import (
    DeviceStalledError,
    EngineLostError,
    StreamMemoryError,
    is_device_lost,
)
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.cuda.workspaces import keep_workspaces, let_workspaces_go
from neo_desktop.engine.execute.timeline import Stage, TimedEvents, Timeline, timed_event
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Watch

MAX_GRAPHS = 128  # then all of them are captured anew; each takes about a megabyte

CHECK_PATIENCE_S = 10.0  # with a program of two flags, which takes microseconds

Work = Callable[[], object]


class Lane(StrEnum):
    """Each carries out its work in order, beside the others."""

    DEVICE = "device"
    TO_HOST = "to-host"
    TO_DEVICE = "to-device"


class Mark(Protocol):
    """The end of a piece of work; what comes after it on another lane says so."""


class Recorder(Protocol):
    """Takes a program: what is given to a lane is carried out after all earlier work of that lane."""

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Mark] = ()) -> Mark:
        """Carry `work` out after the marks, which are of other lanes. It may run again without Python."""
        ...

    def raise_flag(self, lane: Lane, flag: Tensor) -> Mark:
        """Set an int32 in pinned host memory to 1, once the lane's earlier work can be seen there."""
        ...

    def wait_for_flag(self, lane: Lane, flag: Tensor, answers: Mark) -> None:
        """Hold the lane until an int32 in pinned host memory is 1, which the host makes it.

        CUDA may put several streams, or nodes of a graph, into one hardware queue. It must know of every
        order that a wait relies on: without it the wait may come to stand before what makes the host act.

        Args:
            answers: the end of the `raise_flag` on which the host acts; the lane waits for that, too.
        """
        ...


Program = Callable[[Recorder], None]


class Runner(Protocol):
    """Runs programs. What waits raises DeviceStalledError and DeviceLostError, see `wait_for_gpu`."""

    def begin(self, watch: Watch) -> None:
        """Take what is to be waited with from now on."""
        ...

    def start(self, key: Hashable, program: Program) -> None:
        """Start to carry a program out; programs of one key are the same one.

        What the caller puts on its current stream from then on comes after the program.
        """
        ...

    def wait(self) -> None:
        """Block until the program that was started has ended."""
        ...

    def settle(self) -> None:
        """Block until nothing of a program that was broken off is under way. No flag may be missing."""
        ...

    def forget(self) -> None:
        """Give up what is kept of programs, and its memory."""
        ...


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    spans: list[TimedEvents]


class CudaRunner:
    """Runs a program at once when it is new, which compiles its kernels, and captures it for the next time.

    Its graphs are given up all together. They share the working memory that cuBLAS has on their stream, and
    torch (2.13) gives that back with the first of them that goes: the others would go on writing to it.

    Args:
        streams: one per lane, none of them torch's default stream.
        timeline: told when lanes were busy, if it records all iterations: a graph has events or has not.
    """

    def __init__(self, streams: Mapping[Lane, torch.cuda.Stream], timeline: Timeline | None) -> None:
        self._streams = dict(streams)
        self._timeline = timeline if timeline is not None and timeline.is_continuous else None
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time and can share memory
        self._spans: list[TimedEvents] = []  # of what was started last
        self._watch = DEFAULT_PATIENCE.watch()

    def begin(self, watch: Watch) -> None:
        """See `Runner`."""
        self._watch = watch

    def start(self, key: Hashable, program: Program) -> None:
        """See `Runner`.

        Raises:
            torch.OutOfMemoryError: there is no room for the graph.
        """
        stream = self._streams[Lane.DEVICE]
        graph = self._graphs.get(key)
        with torch.cuda.stream(stream):
            if graph is None:
                self._spans = self._record(program)
                self._wait(stream, "the first run of a graph")
                self._capture(key, program)
            else:
                graph.graph.replay()
                self._spans = graph.spans
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def wait(self) -> None:
        """See `Runner`."""
        self._wait(self._streams[Lane.DEVICE], "a graph")
        if self._timeline is not None:
            for span in self._spans:
                self._timeline.add_events(span.lane, span.stage, span.start, span.end)

    def settle(self) -> None:
        """See `Runner`."""
        for lane, stream in self._streams.items():
            self._wait(stream, f"what is on its stream {lane.value!r}")

    def _wait(self, stream: torch.cuda.Stream, what: str) -> None:
        # The relay's guard has the same patience. It comes first, and raises the flags that are waited for.
        wait_for_gpu(stream, self._watch, what, patience=2.0)

    def forget(self) -> None:
        """See `Runner`."""
        self._graphs.clear()
        let_workspaces_go(self)
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, key: Hashable, program: Program) -> None:
        if len(self._graphs) >= MAX_GRAPHS:
            self.forget()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile, a server's or a benchmark's.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                spans = self._record(program)
            except BaseException:
                with suppress(RuntimeError):  # what broke the capture is the error to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            self.forget()  # since this one goes
            raise
        keep_workspaces(self)
        self._graphs[key] = _Graph(graph, spans)

    def _record(self, program: Program) -> list[TimedEvents]:
        recorder = _StreamRecorder(self._streams, is_timed=self._timeline is not None)
        program(recorder)
        recorder.join()
        return recorder.spans


@dataclass(slots=True)
class _StreamRecorder:
    """Puts a program on streams. All of them are joined to the device's, where a capture begins and ends."""

    streams: Mapping[Lane, torch.cuda.Stream]
    is_timed: bool
    spans: list[TimedEvents] = field(default_factory=list)

    def __post_init__(self) -> None:
        begin = self.streams[Lane.DEVICE].record_event()
        for lane in (Lane.TO_HOST, Lane.TO_DEVICE):
            self.streams[lane].wait_event(begin)

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Mark] = ()) -> Mark:
        stream = self.streams[lane]
        for mark in after:
            assert isinstance(mark, torch.cuda.Event)
            stream.wait_event(mark)
        start = self._time(stream)
        with torch.cuda.stream(stream):
            work()
        end = self._time(stream)
        if start is not None and end is not None:
            self.spans.append(TimedEvents(lane, stage, start, end))
        end_of_work: torch.cuda.Event = stream.record_event()
        return end_of_work

    def raise_flag(self, lane: Lane, flag: Tensor) -> Mark:
        stream_write_value(self.streams[lane], flag)
        raised: torch.cuda.Event = self.streams[lane].record_event()
        return raised

    def wait_for_flag(self, lane: Lane, flag: Tensor, answers: Mark) -> None:
        assert isinstance(answers, torch.cuda.Event)
        self.streams[lane].wait_event(answers)
        stream_wait_value(self.streams[lane], flag)

    def join(self) -> None:
        """Let the device's stream wait for all others."""
        for lane in (Lane.TO_HOST, Lane.TO_DEVICE):
            self.streams[Lane.DEVICE].wait_event(self.streams[lane].record_event())

    def _time(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        if not self.is_timed:
            return None
        event = timed_event(in_graph=True)
        event.record(stream)
        return event


def check_flags(runner: Runner, flag: Tensor) -> None:
    """Try whether a program can raise a flag and wait for it, at once and as a graph.

    Args:
        runner: forgets its programs.
        flag: an int32 in pinned host memory.

    Raises:
        StreamMemoryError: the driver refuses, or the flag does not arrive.
        DeviceLostError: the GPU does not come back from it.
    """

    def program(recorder: Recorder) -> None:
        raised = recorder.raise_flag(Lane.TO_HOST, flag)
        recorder.wait_for_flag(Lane.TO_DEVICE, flag, raised)

    try:
        runner.begin(Watch(CHECK_PATIENCE_S))
        for way in ("at once", "by a graph"):
            flag.zero_()
            runner.start("check flags", program)
            runner.wait()
            if flag.item() != 1:
                raise StreamMemoryError(f"a word that was to be written to host memory {way} did not arrive")
    except DeviceStalledError as error:
        flag.fill_(1)  # which is all that the GPU may be waiting for
        runner.settle()
        raise StreamMemoryError(
            f"a stream that waits for a word in host memory waits for ever: {error}"
        ) from error
    except (StreamMemoryError, EngineLostError):
        raise
    except RuntimeError as error:  # torch's, of the capture
        if is_device_lost(error):
            raise
        raise StreamMemoryError(str(error)) from error
    finally:
        runner.begin(DEFAULT_PATIENCE.watch())
        runner.forget()
