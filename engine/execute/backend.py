"""Backends that run programs: threads for a model on the CPU, or streams and graphs of a GPU."""

import ctypes
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from neo_desktop.engine.cuda.errors import EngineLostError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import keep_workspaces, let_workspaces_go
from neo_desktop.engine.execute.graphs import AnyProgram, Graphs, Recorder
from neo_desktop.engine.execute.lane import Lane, Signal, Step
from neo_desktop.engine.execute.lanes import TOLD_BY, Lanes
from neo_desktop.engine.execute.stream_lane import Tape
from neo_desktop.engine.execute.timeline import TimedEvents, Timeline
from neo_desktop.engine.watchdog import Watchdog

# A part without work on the device makes an empty graph, which is harmless.
warnings.filterwarnings("ignore", "The CUDA Graph is empty")

NEVER_CAPTURED = (Lane.STORE, Lane.SWAP, Lane.EXPERTS)  # lanes whose work depends on the plan


class Backend(Protocol):
    """A runner of programs, one at a time. Methods that wait raise DeviceStalledError and DeviceLostError."""

    def on_device(self) -> AbstractContextManager[object]:
        """Order this thread's device work after the started program."""

    def begin(self, watch: Watchdog) -> None:
        """Set the watchdog for all further waits."""

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        """Start a program after all earlier ones.

        Args:
            with_flags: True if relays do the CPU's part.
            with_graphs: True if its capturable steps may become graphs.

        Returns:
            True if later programs of its key will be faster: kernels were compiled, or graphs captured.
        """

    def wait(self) -> None:
        """Block until the oldest program without a `wait` has ended."""

    def abandon(self, error: BaseException) -> EngineLostError | None:
        """Block until no program is in flight any more, aborted ones included.

        After a stall, wait for the device once more: its flags may have been raised meanwhile.

        Returns:
            The reason if the engine is lost; None: the backend can continue.
        """

    @property
    def has_graphs(self) -> bool:
        """True if the backend keeps graphs, or tried to capture one for the last program."""

    def forget(self) -> None:
        """Drop all graphs and free their memory."""

    def close(self) -> None:
        """End all threads, even during an iteration."""


class ThreadBackend:
    """The backend without a GPU, on threads. It replays recorded graphs, unless the timeline records.

    Args:
        lanes: Lanes for tests; None: the default threads.
    """

    has_graphs = False

    def __init__(self, timeline: Timeline | None, lanes: Lanes | None = None) -> None:
        self._lanes = lanes or Lanes.threads(timeline)
        self._timeline = timeline
        self._graphs = Graphs(partial(Recorder, self._lanes), self.forget)

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, watch: Watchdog) -> None:
        self._lanes.begin(watch)

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        """Run a program; the device's part has ended when this returns."""
        is_timed = self._timeline is not None and self._timeline.is_recording
        return self._graphs.start(program, self._lanes, with_graphs=with_graphs and not is_timed)[0]

    def wait(self) -> None:
        self._lanes.join()

    def abandon(self, error: BaseException) -> EngineLostError | None:
        return self._lanes.abandon(error)

    def forget(self) -> None:
        self._graphs.clear()

    def close(self) -> None:
        self._lanes.close()


@dataclass(slots=True)
class _CUDAGraph:
    graph: torch.cuda.CUDAGraph
    spans: list[TimedEvents]

    def replay(self) -> None:
        self.graph.replay()


@dataclass(slots=True)
class _Run:
    """A started program."""

    lanes: Lanes
    ends: list[Signal]  # ends of the stages outside graphs, and the end of the program
    spans: list[TimedEvents]  # timed events of its graphs


class StreamBackend:
    """The backend for a GPU, on streams and graphs.

    Graphs are dropped all together. They share the cuBLAS workspace of their stream, and torch (2.13) frees
    it with the first dropped graph: the remaining graphs would write to freed memory.

    Args:
        timeline: Records busy times of lanes. If it records all iterations, graphs include timing events.
    """

    def __init__(self, streams: Streams, timeline: Timeline | None) -> None:
        self._streams = {lane: streams.stream() for lane in Lane if lane not in TOLD_BY}
        self._device = self._streams[Lane.DEVICE]
        self._main = streams
        self._timeline = timeline
        self._tape = Tape(is_timed=timeline is not None and timeline.is_continuous)
        self._lanes = {
            with_flags: Lanes.streams(self._streams, timeline, self._tape, with_flags=with_flags)
            for with_flags in (False, True)
        }
        self._used = self._lanes[False]
        self._has_failed = False  # True if the capture of the last program failed
        self._graphs = Graphs(self._captured, self.forget)
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time and can share memory
        self._runs: deque[_Run] = deque()  # started programs without a `wait`

    @property
    def has_graphs(self) -> bool:
        return len(self._graphs) > 0 or self._has_failed

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with self._main.on_device():
            self._device.wait_stream(torch.cuda.current_stream(self._device.device))
            with torch.cuda.stream(self._device):
                yield
            torch.cuda.current_stream(self._device.device).wait_stream(self._device)

    def begin(self, watch: Watchdog) -> None:
        for lanes in self._lanes.values():
            lanes.begin(watch)

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        """Start a program, as graphs where possible.

        Raises:
            torch.OutOfMemoryError: GPU memory is too small for the program or a graph.
        """
        self._used = self._lanes[with_flags]
        self._has_failed = False
        self._fork()
        with torch.cuda.stream(self._device):
            is_new, graphs = self._graphs.start(program, self._used, with_graphs=with_graphs)
        self._join()
        spans = [span for graph in graphs for span in graph.spans]
        self._runs.append(_Run(self._used, [*self._used.ends(), self._used.mark("its streams")], spans))
        return is_new

    def wait(self) -> None:
        run = self._runs.popleft()
        run.lanes.join_host()
        for end in run.ends:
            end.wait()
        if self._timeline is not None:
            for span in run.spans:
                self._timeline.add_events(span.lane, span.stage, span.start, span.end)

    def abandon(self, error: BaseException) -> EngineLostError | None:
        return self._used.abandon(error)

    def forget(self) -> None:
        for run in self._runs:  # torch reuses a graph's memory at once
            with suppress(RuntimeError):  # `wait` raises this error
                run.ends[-1].wait()
        self._graphs.clear()
        let_workspaces_go(self)
        self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.close()

    def _captured(self, steps: Sequence[Step]) -> _CUDAGraph:
        """Capture steps, and launch the graph."""
        graph = torch.cuda.CUDAGraph()
        tape = self._tape
        with torch.cuda.stream(self._device):
            try:
                self._begin_capture(graph)
                tape.is_capturing, tape.spans = True, []
                tape.number += 1
                try:
                    self._fork()
                    for step in steps:
                        step.submit(self._used)
                    self._join()
                except BaseException:
                    with suppress(RuntimeError):  # the original error matters more
                        self._join()  # a capture cannot end before all its streams have joined
                    with suppress(RuntimeError):
                        self._end_capture(graph)
                    raise
                finally:
                    tape.is_capturing = False
                    tape.number += 1
                self._end_capture(graph)
            except BaseException:
                self.forget()  # since this graph is dropped
                self._has_failed = True
                raise
        keep_workspaces(self)
        graph.replay()
        return _CUDAGraph(graph, tape.spans)

    def _begin_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            # Other threads, of a server or a benchmark, may use CUDA during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._end_allocation()
            _keep_for_ever(graph)
            raise

    def _end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            if self._end_allocation():
                _keep_for_ever(graph)
            raise

    def _end_allocation(self) -> bool:
        """End a capture in torch's allocator after the driver failed to begin or end it.

        torch ends it only after the driver. An allocator in capture mode never frees cached blocks to serve a
        request.

        Returns:
            True if the allocator was still in capture mode.
        """
        index = self._device.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        except RuntimeError:
            return False
        return True

    def _fork(self) -> None:
        """Make all streams wait for the device's stream, which includes them in a capture."""
        begin = self._device.record_event()
        for lane, stream in self._streams.items():
            if lane is not Lane.DEVICE and not (self._tape.is_capturing and lane in NEVER_CAPTURED):
                stream.wait_event(begin)

    def _join(self) -> None:
        """Make the device's stream wait for all others."""
        for lane, stream in self._streams.items():
            if lane is not Lane.DEVICE and not (self._tape.is_capturing and lane in NEVER_CAPTURED):
                self._device.wait_event(stream.record_event())


def _keep_for_ever(graph: torch.cuda.CUDAGraph) -> None:
    """Leak a graph whose capture did not begin or end, even at process exit.

    torch's allocator of pinned memory may still query the graph. And if memory for its random-number state
    was missing, torch (2.11) aborts the process when the graph is freed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


def open_backend(streams: Streams, timeline: Timeline | None = None) -> Backend:
    """Return the backend for a device."""
    if streams.device.type == "cuda":
        return StreamBackend(streams, timeline)
    return ThreadBackend(timeline)
