"""What runs programs: threads, where the model runs on the CPU, or a GPU's streams and graphs."""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from neo_desktop.engine.cuda.errors import EngineLostError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import keep_workspaces, let_workspaces_go
from neo_desktop.engine.execute.lane import Lane, Signal
from neo_desktop.engine.execute.lanes import TOLD_BY, Lanes
from neo_desktop.engine.execute.part import Part
from neo_desktop.engine.execute.stream_lane import Tape
from neo_desktop.engine.execute.timeline import TimedEvents, Timeline
from neo_desktop.engine.watchdog import Watchdog

MAX_GRAPHS = 128  # iterations that are kept; then all are captured anew. Each takes about a megabyte

NEVER_FIXED = (Lane.STORE, Lane.SWAP)  # what they get depends on the plan


class AnyProgram(Protocol):
    """What backends know of a program."""

    @property
    def key(self) -> object:
        """What programs have in common whose fixed parts are the same."""

    def parts(self) -> Sequence[Part]:
        """Return all stages, in order."""


class Backend(Protocol):
    """Runs one program after the other. What waits raises DeviceStalledError and DeviceLostError."""

    def on_device(self) -> AbstractContextManager[object]:
        """Let this thread's work on the device come after the program that was started."""
        ...

    def begin(self, watch: Watchdog) -> None:
        """Take what is to be waited with from now on."""
        ...

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        """Start to carry a program out, behind those that were started before.

        Args:
            with_flags: whether relays do the CPU's part.
            with_graphs: whether its fixed parts may become graphs.

        Returns:
            Whether it took longer than others of its key will: kernels were compiled, or graphs captured.
        """
        ...

    def wait(self) -> None:
        """Block until the first program has ended that nobody has waited for."""
        ...

    def abandon(self, error: BaseException) -> EngineLostError | None:
        """Block until nothing is under way, of a program that was broken off or of others.

        After a stall the device is waited for once more: it may have been given what it waited for.

        Returns:
            Why nothing can be done any more, if so.
        """
        ...

    @property
    def has_graphs(self) -> bool:
        """Whether any are kept, or the last program tried to make one."""
        ...

    def forget(self) -> None:
        """Give all graphs up, and their memory."""
        ...

    def close(self) -> None:
        """End all threads, also in the middle of an iteration."""
        ...


class ThreadBackend:
    """Runs programs without a GPU.

    Args:
        timeline: records what lanes do.
        lanes: for tests; None: the usual ones.
        streams: of the model's device; None: there is nothing to be said of them.
    """

    has_graphs = False

    def __init__(
        self, timeline: Timeline | None, lanes: Lanes | None = None, streams: Streams | None = None
    ) -> None:
        self._lanes = lanes or Lanes.threads(timeline)
        self._streams = streams

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else self._streams.on_device()

    def begin(self, watch: Watchdog) -> None:
        self._lanes.begin(watch)

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        """See `Backend`; the device's part has ended when this returns."""
        for part in program.parts():
            part(self._lanes)
        return False

    def wait(self) -> None:
        self._lanes.join()

    def abandon(self, error: BaseException) -> EngineLostError | None:
        return self._lanes.abandon(error)

    def forget(self) -> None:
        """Do nothing: there are no graphs."""

    def close(self) -> None:
        self._lanes.close()


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    spans: list[TimedEvents]


@dataclass(slots=True)
class _Run:
    """A program that was started."""

    lanes: Lanes
    ends: list[Signal]  # of the stages that were put on streams one by one, and of everything
    spans: list[TimedEvents]  # of its graphs


class StreamBackend:
    """Runs programs on a GPU.

    The first program of a kind is put on streams stage by stage, which compiles its kernels. From the second
    one on its fixed parts are graphs: each is captured, launched, and launched again in later programs.

    Graphs are given up all together. They share the working memory that cuBLAS has on their stream, and torch
    (2.13) gives that back with the first of them that goes: the others would go on writing to it.

    Args:
        streams: where the lanes' own come from.
        timeline: told when lanes were busy. Graphs are captured with events if it records all iterations.
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
        self._seen: set[object] = set()
        self._has_failed = False  # to capture the last program
        self._graphs: dict[object, dict[int, _Graph]] = {}
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time and can share memory
        self._runs: deque[_Run] = deque()  # that nobody has waited for

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs) or self._has_failed

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
        """See `Backend`.

        Raises:
            torch.OutOfMemoryError: there is no room, be it for a graph.
        """
        self._used = self._lanes[with_flags]
        self._has_failed = False
        self._fork()
        key, spans, parts = program.key, [], program.parts()
        is_new = key not in self._seen
        is_graph = with_graphs and not is_new and any(part.is_fixed for part in parts)
        if with_graphs:
            self._seen.add(key)
        if is_graph and key not in self._graphs and len(self._graphs) >= MAX_GRAPHS:
            self.forget()
        graphs = self._graphs.setdefault(key, {}) if is_graph else {}
        is_new = is_new or (is_graph and not graphs)
        for number, part in enumerate(parts):
            if not (is_graph and part.is_fixed):
                part(self._used)
                continue
            if number not in graphs:
                graphs[number] = self._capture(part)
            with torch.cuda.stream(self._device):
                graphs[number].graph.replay()
            spans += graphs[number].spans
        self._join()
        self._runs.append(_Run(self._used, [*self._used.ends(), self._used.mark("its streams")], spans))
        return with_graphs and is_new

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
        for run in self._runs:  # torch gives a graph's memory to others at once
            with suppress(RuntimeError):  # raised where the program is waited for
                run.ends[-1].wait()
        self._seen.clear()
        self._graphs.clear()
        let_workspaces_go(self)
        self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.close()

    def _capture(self, part: Part) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        tape = self._tape
        with torch.cuda.stream(self._device):
            try:
                self._begin_capture(graph)
                tape.is_capturing, tape.spans = True, []
                tape.number += 1
                try:
                    self._fork()
                    part(self._used)
                    self._join()
                except BaseException:
                    with suppress(RuntimeError):  # what broke the capture is the error to tell
                        self._join()  # a capture with streams of its own outside cannot end
                    with suppress(RuntimeError):
                        self._end_capture(graph)
                    raise
                finally:
                    tape.is_capturing = False
                    tape.number += 1
                self._end_capture(graph)
            except BaseException:
                self.forget()  # since this one goes
                self._has_failed = True
                raise
        keep_workspaces(self)
        return _Graph(graph, tape.spans)

    def _begin_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            # Other threads may use CUDA meanwhile, a server's or a benchmark's.
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
        """Tell torch's allocator that a capture is over which the driver did not begin or end.

        torch does so only after the driver. An allocator that waits for the end of a capture never frees
        cached blocks to serve a request.

        Returns:
            Whether the allocator did not know.
        """
        index = self._device.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        except RuntimeError:
            return False
        return True

    def _fork(self) -> None:
        """Let all streams wait for the device's: so a capture includes them."""
        begin = self._device.record_event()
        for lane, stream in self._streams.items():
            if lane is not Lane.DEVICE and not (self._tape.is_capturing and lane in NEVER_FIXED):
                stream.wait_event(begin)

    def _join(self) -> None:
        """Let the device's stream wait for all others."""
        for lane, stream in self._streams.items():
            if lane is not Lane.DEVICE and not (self._tape.is_capturing and lane in NEVER_FIXED):
                self._device.wait_event(stream.record_event())


def _keep_for_ever(graph: torch.cuda.CUDAGraph) -> None:
    """Never free a graph whose capture did not begin or end, not even when the process ends.

    torch's allocator of pinned memory may still ask it. And where there was no memory for the state of its
    random numbers, torch (2.11) aborts the process when it is freed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


def open_backend(streams: Streams, timeline: Timeline | None = None) -> Backend:
    """Return what runs programs on a device."""
    if streams.device.type == "cuda":
        return StreamBackend(streams, timeline)
    return ThreadBackend(timeline, streams=streams)
