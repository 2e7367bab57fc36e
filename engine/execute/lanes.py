"""All lanes of an iteration, as one launcher.

Without a GPU, the device's lane is the calling thread, and all other lanes are threads that do real copies.
So work in a wrong order shows as wrong tokens on any machine. With a GPU, lanes are CUDA streams, and the
CPU's lanes are relays. If the driver does not support stream memory operations, threads replace the relays,
and the thread that launches work waits for them.

Work may wait only for signals of work submitted earlier, so waits never form a cycle. If work fails, its
signal carries the exception, and all dependent work fails without running.

No wait is unlimited. If no stage of any lane ends within the iteration's timeout, waits fail with an error
that names the stage. The process then cannot compute any more: neither a thread nor the GPU can be forced to
abort a stage, so its lane and the memory that it works on stay lost.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import torch

from neo_desktop.engine.cuda.errors import DeviceLostError, DeviceStalledError, EngineLostError
from neo_desktop.engine.execute.lane import HostLane, HostTask, Lane, Signal, Work, WorkLane
from neo_desktop.engine.execute.stream_lane import TIMEOUT_WITH_RELAYS, RelayLane, StreamLane, Tape
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog

# CPU lane -> lane whose stream raises the flags of its relay.
TOLD_BY = {Lane.CPU: Lane.TO_HOST, Lane.HOST_SWAP: Lane.SWAP, Lane.HOST_WEIGHTS: Lane.WEIGHTS}


class _Done:
    """The signal of finished work."""

    def wait(self) -> None:
        pass

    def hold(self, stream: torch.cuda.Stream) -> None:
        pass


_DONE = _Done()


class CallerLane(WorkLane):
    """The device's lane of a model on the CPU: the calling thread."""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._watch = DEFAULT_TIMEOUT.watch()

    def begin(self, watch: Watchdog) -> None:
        self._watch = watch

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        self.wait(after)
        start_ns = time.perf_counter_ns()
        work()
        self._watch.tick()
        if self._timeline is not None and self._timeline.is_recording:
            self._timeline.add(Lane.DEVICE, stage, start_ns, time.perf_counter_ns())
        return _DONE

    def mark(self, what: str) -> Signal:
        return _DONE

    def wait(self, signals: Sequence[Signal]) -> None:
        for signal in signals:
            signal.wait()


class WorkerLane(HostLane):
    """Two threads: one sends rows, the other receives the answers in the same order (Lamina, section 5.2).

        sends    |rows 0|        |rows 1|            |rows 0, next layer|
        worker          |attend to 0    |attend to 1     |attend to 0 ..
        takes                        |o 0|            |o 1|

    Each sub-batch has at most one layer's rows in flight, so at most two requests await an answer.

    The timeline records the sends, and the waits for answers, from the send or the previous answer on.
    """

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = name
        self._sends = ThreadLane(f"{name} sends", timeline)
        self._takes = ThreadLane(name, timeline)

    def begin(self, watch: Watchdog) -> None:
        self._sends.begin(watch)
        self._takes.begin(watch)

    def submit_step(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        """Submit a step; the signal is the arrival of the answer."""
        if task.ask is not None:
            stage = task.stage(turn)._replace(name="q, k, v to a worker")
            after = (self._sends.submit(stage, partial(task.ask, turn), after),)
        return self._takes.submit_step(task, turn, after)

    def cancel(self) -> None:
        """Drop unsent rows. Outstanding answers are still received, or later rows would get them."""
        self._sends.cancel()

    def join(self) -> None:
        try:
            self._sends.join()
        finally:
            self._takes.join()

    def stop(self) -> None:
        self._sends.stop()
        self._takes.stop()

    def close(self) -> None:
        self._sends.close()
        self._takes.close()


class Lanes:
    """The launcher of an iteration's work.

    Args:
        beside: The other lanes of the device.
        timeline: Timeline for workers' lanes, which are threads created on first use.
        with_flags: True if streams start the work of the CPU and of workers by flags.
    """

    def __init__(
        self,
        device: CallerLane | StreamLane,
        beside: Mapping[Lane, WorkLane],
        host: Mapping[Lane, HostLane],
        timeline: Timeline | None = None,
        *,
        with_flags: bool = False,
    ) -> None:
        self._device = device
        self._work: dict[Lane, WorkLane] = {Lane.DEVICE: device, **beside}
        self._host: dict[str, HostLane] = {str(lane): each for lane, each in host.items()}
        self._timeline = timeline
        self._with_flags = with_flags
        self._watch = DEFAULT_TIMEOUT.watch()
        self._is_stopped = False
        self._changes = threading.Lock()  # guards the set of lanes

    @classmethod
    def threads(cls, timeline: Timeline | None) -> Self:
        """Make the lanes of a model on the CPU."""
        host = {lane: ThreadLane(lane, timeline) for lane in TOLD_BY}
        others = set(Lane) - set(TOLD_BY) - {Lane.DEVICE}
        return cls(
            CallerLane(timeline), {lane: ThreadLane(lane, timeline) for lane in others}, host, timeline
        )

    @classmethod
    def streams(
        cls,
        streams: Mapping[Lane, torch.cuda.Stream],
        timeline: Timeline | None,
        tape: Tape,
        *,
        with_flags: bool,
    ) -> Self:
        """Make the lanes of a model on a GPU.

        Args:
            streams: One stream per lane, without the CPU's lanes.
            with_flags: True if relays do the CPU's work, False if threads do.
        """
        timeout = TIMEOUT_WITH_RELAYS if with_flags else 1.0
        lanes = {lane: StreamLane(lane, timeline, stream, tape, timeout) for lane, stream in streams.items()}
        host: dict[Lane, HostLane] = {}
        for lane, told_by in TOLD_BY.items():
            host[lane] = RelayLane(lanes[told_by]) if with_flags else ThreadLane(lane, timeline)
        device = lanes.pop(Lane.DEVICE)
        return cls(device, lanes, host, timeline, with_flags=with_flags)

    @property
    def _all(self) -> tuple[WorkLane | HostLane, ...]:
        with self._changes:
            return *self._host.values(), *reversed(self._work.values())

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        return self._work[lane].submit(stage, work, after)

    def host(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        lane = self._host.get(task.lane) or self._worker_lane(task)
        return lane.submit_step(task, turn, after)

    def _worker_lane(self, task: HostTask) -> HostLane:
        if self._with_flags and task.flags is not None:
            return self._host[Lane.CPU]  # the same stream raises its flags
        name = task.lane
        lane = WorkerLane(name, self._timeline)
        lane.begin(self._watch)
        with self._changes:
            if self._is_stopped:
                lane.stop()
            self._host[name] = lane
        return lane

    def mark(self, what: str = "what comes before a copy") -> Signal:
        """Return a signal for the end of the device's work so far; `what` names the work in messages."""
        return self._device.mark(what)

    def wait(self, signals: Sequence[Signal]) -> None:
        self._device.wait(signals)

    def begin(self, watch: Watchdog) -> None:
        """Begin an iteration with this watchdog."""
        self._watch = watch
        for lane in self._all:
            lane.begin(watch)

    def ends(self) -> list[Signal]:
        """Return and clear the end signals of the streams' work since `begin`, in order."""
        return [event for lane in self._all if isinstance(lane, StreamLane) for event in lane.take_passed()]

    def join_host(self) -> None:
        """Block until all work of the CPU's lanes has ended; see `join`."""
        for lane in tuple(self._host.values()):
            lane.join()

    def join(self) -> None:
        """Block until all work has ended; raise the exception of work that failed.

        Raises:
            EngineLostError: A stage did not end.
        """
        for lane in self._all:
            lane.join()

    def abandon(self, error: BaseException | None = None) -> EngineLostError | None:
        """Drop work that has not begun, and block until the rest has ended or failed.

        Args:
            error: The error that caused the abort, if any. After a stall, wait for the streams once more:
                their flags may have been raised meanwhile.

        Returns:
            The reason if the engine is lost: `error`, or a new stall; None: all lanes can be used again.
        """
        for lane in self._all:
            lane.cancel()
        may_end = isinstance(error, DeviceStalledError)
        lost = error if isinstance(error, EngineLostError) and not may_end else None
        for lane in self._all:
            if isinstance(lost, DeviceLostError):
                break  # threads would wait for the GPU in vain
            try:
                lane.join()
            except EngineLostError as another:
                lost = lost or another
            except Exception:
                pass
        return lost

    def close(self) -> None:
        """End all threads, even during an iteration. May be called again, from any thread."""
        with self._changes:
            self._is_stopped = True
        for lane in self._all:  # stop every lane first, since work may wait for another lane
            lane.stop()
        for lane in self._all:
            lane.close()
