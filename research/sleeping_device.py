"""A device that only takes time: its streams end when a GPU of stated rates would have finished.

It replaces a GPU in an engine's pipeline. The program is recorded once, like a CUDA graph. A piece of work
has a duration and starts when its dependencies have ended. One thread watches the clock, raises the flags
that the CPU's relays wait for when they are due, and polls the flags that the relays raise. Like a GPU it
polls without a pause, so it needs its own core.

    device   |resident rows        |piece|              the clock decides when work ends
    weights  |piece     |piece     |
    to-host  |x| raises READY
    cpu          |a relay multiplies: real work |
    to-device                  DONE is seen |product|
"""

import ctypes
import heapq
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import EngineLostError
from neo_desktop.engine.execute.backend import AnyProgram
from neo_desktop.engine.execute.lane import HostStep, Lane, Signal, Work
from neo_desktop.engine.execute.lanes import TOLD_BY
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import DONE, READY

# Duration of a piece of work on the device, in seconds; None: the work runs and takes its real time.
Lengths = Callable[[Lane, Work], float | None]


def _word(flag: Tensor) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(flag.data_ptr())


@dataclass(eq=False, slots=True)
class _Operation:
    seconds: float | None
    work: Work
    num_before: int  # dependencies
    raises: ctypes.c_int32 | None = None
    awaits: ctypes.c_int32 | None = None
    followers: list["_Operation"] = field(default_factory=list)

    def wait(self) -> None:
        raise AssertionError("streams wait for streams")

    def hold(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams")


class _Launcher:
    """A `Launcher` that records operations."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._last: dict[Lane, _Operation] = {}
        self.operations: list[_Operation] = []

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        return self._add(lane, self._lengths(lane, work), work, after)

    def host(self, lane: Lane, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        raised = self._add(TOLD_BY[lane], 0.0, _nothing, after)
        raised.raises = _word(step.flags[READY, :1])
        done = _Operation(0.0, _nothing, 1, awaits=_word(step.flags[DONE, :1]))
        raised.followers.append(done)
        self.operations.append(done)
        return done

    def mark(self) -> Signal:
        return self._add(Lane.DEVICE, 0.0, _nothing, ())

    def wait(self, signals: Sequence[Signal]) -> None:
        self._add(Lane.DEVICE, 0.0, _nothing, signals)

    def _add(self, lane: Lane, seconds: float | None, work: Work, after: Sequence[Signal]) -> _Operation:
        before = {id(each): each for each in (*after, self._last.get(lane)) if isinstance(each, _Operation)}
        operation = _Operation(seconds, work, len(before))
        for each in before.values():
            each.followers.append(operation)
        self._last[lane] = operation
        self.operations.append(operation)
        return operation


def _nothing() -> None:
    pass


class SleepingDevice:
    """A `Backend`; relays must do the CPU's part.

    Args:
        lengths: durations of work.
    """

    has_graphs = False

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._graphs: dict[object, list[_Operation]] = {}
        self._started: list[_Operation] = []

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, watch: Watchdog) -> None:
        pass

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        assert with_flags, "nobody would do the CPU's part"
        is_new = program.key not in self._graphs
        if is_new:
            launcher = _Launcher(self._lengths)
            for part in program.parts():
                part(launcher)
            self._graphs[program.key] = launcher.operations
        self._started = self._graphs[program.key]
        return is_new

    def wait(self) -> None:
        """Wait for the end of the program."""
        clock = time.perf_counter
        left = {operation: operation.num_before for operation in self._started}
        ends: list[tuple[float, int, _Operation]] = []  # of running work
        awaited: list[_Operation] = []
        begins: list[tuple[float, _Operation]] = [
            (clock(), operation) for operation, count in left.items() if count == 0
        ]
        latest: dict[_Operation, float] = {}  # latest end of the dependencies, so far
        number = 0
        while begins or ends or awaited:
            while begins:
                start, operation = begins.pop()
                if operation.awaits is not None and not operation.awaits.value:
                    awaited.append(operation)
                    continue
                if operation.seconds is None:
                    operation.work()
                    start = clock()
                elif operation.seconds:
                    number += 1
                    heapq.heappush(ends, (start + operation.seconds, number, operation))
                    continue
                self._end(operation, start, left, latest, begins)
            now = clock()
            if ends and ends[0][0] <= now:
                end, _, operation = heapq.heappop(ends)
                self._end(operation, end, left, latest, begins)
            for operation in awaited:
                if operation.awaits is not None and operation.awaits.value:
                    awaited.remove(operation)
                    self._end(operation, clock(), left, latest, begins)
                    break

    @staticmethod
    def _end(
        operation: _Operation,
        end: float,
        left: dict[_Operation, int],
        latest: dict[_Operation, float],
        begins: list[tuple[float, _Operation]],
    ) -> None:
        """Record the end, possibly in the past: dependent work started then."""
        if operation.raises is not None:
            operation.raises.value = 1
        for follower in operation.followers:
            latest[follower] = start = max(latest.get(follower, end), end)
            left[follower] -= 1
            if not left[follower]:
                begins.append((start, follower))

    def abandon(self, error: BaseException) -> EngineLostError | None:
        return None

    def forget(self) -> None:
        self._graphs.clear()

    def close(self) -> None:
        pass
