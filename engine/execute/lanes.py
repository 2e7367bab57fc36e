"""All lanes of an iteration, as one launcher.

Without a GPU, the device's lane is the thread that carries out the iteration, and all others are threads
that do real copies, so that work in a wrong order shows as wrong tokens on any machine. With a GPU, lanes
are CUDA streams, and the CPU's are relays; where the driver does not let streams write and wait for flags,
threads take the relays' tier, and the thread that launches work waits for them.

Work may wait for signals of what was given to lanes before, and for nothing else, so nothing ever waits in a
circle. Work that fails fails its signal with the exception, and so does all work that waits for it, without
running.

Nothing waits for ever. When no stage of any lane has ended for longer than an iteration's timeout, waiting
ends with an error that names the stage. It means that nothing more can be computed in this process: neither a
thread nor the GPU can be made to give a stage up, so that its lane, and the memory it works on, stay lost.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

import torch

from neo_desktop.engine.cuda.errors import DeviceLostError, DeviceStalledError, EngineLostError
from neo_desktop.engine.execute.lane import HostLane, HostStep, Lane, Signal, Work, WorkLane
from neo_desktop.engine.execute.stream_lane import TIMEOUT_WITH_RELAYS, RelayLane, StreamLane, Tape
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.execute.worker_lane import WorkerLane
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog

# The CPU's lanes, and whose streams raise the flags of their relays.
TOLD_BY = {Lane.CPU: Lane.TO_HOST, Lane.HOST_SWAP: Lane.SWAP, Lane.HOST_WEIGHTS: Lane.WEIGHTS}


class _Done:
    """The signal of work that has ended."""

    def wait(self) -> None:
        pass

    def hold(self, stream: torch.cuda.Stream) -> None:
        pass


_DONE = _Done()


class CallerLane:
    """The thread that carries out the iteration, for a model that runs on the CPU."""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._watch = DEFAULT_TIMEOUT.watch()

    def begin(self, watch: Watchdog) -> None:
        self._watch = watch

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Wait for the signals, and do the work."""
        self.wait(after)
        start_ns = time.perf_counter_ns()
        work()
        self._watch.tick()
        if self._timeline is not None and self._timeline.is_recording:
            self._timeline.add(Lane.DEVICE, stage, start_ns, time.perf_counter_ns())
        return _DONE

    def mark(self, what: str) -> Signal:
        """Return the end of everything up to here."""
        return _DONE

    def wait(self, signals: Sequence[Signal]) -> None:
        """Wait for the signals."""
        for signal in signals:
            signal.wait()

    def cancel(self) -> None:
        """Do nothing: nothing is left to be begun."""

    def join(self) -> None:
        """Do nothing: all has ended."""

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lanes:
    """What an iteration is recorded with.

    Args:
        device: the model's lane.
        beside: the other lanes whose work belongs to the device.
        host: those of the CPU's work.
        timeline: for lanes of workers: threads, which are made when one is first used.
        with_flags: whether streams tell of the CPU's work, and of workers', by flags.
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
        self._changes = threading.Lock()  # of what lanes there are

    @classmethod
    def threads(cls, timeline: Timeline | None) -> Self:
        """Make the lanes of a model that runs on the CPU."""
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
        """Make the lanes of a model that runs on a GPU.

        Args:
            streams: of all lanes but the CPU's.
            tape: what captures write to.
            with_flags: whether relays do the CPU's work; threads do otherwise.
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

    def host(self, lane: str, stage: Stage, step: HostStep, after: Sequence[Signal] = ()) -> Signal:
        return (self._host.get(lane) or self._of_worker(lane, step)).submit_step(stage, step, after)

    def _of_worker(self, name: str, step: HostStep) -> HostLane:
        if self._with_flags and step.flags is not None:
            return self._host[Lane.CPU]  # the same stream tells
        lane = WorkerLane(name, self._timeline)
        lane.begin(self._watch)
        with self._changes:
            if self._is_stopped:
                lane.stop()
            self._host[name] = lane
        return lane

    def mark(self, what: str = "what comes before a copy") -> Signal:
        """See `Launcher`; it has this name for people."""
        return self._device.mark(what)

    def wait(self, signals: Sequence[Signal]) -> None:
        self._device.wait(signals)

    def begin(self, watch: Watchdog) -> None:
        """Begin an iteration, which is waited for in this way."""
        self._watch = watch
        for lane in self._all:
            lane.begin(watch)

    def ends(self) -> list[Signal]:
        """Return the ends of what streams have got since `begin`, in order, and forget them."""
        return [event for lane in self._all if isinstance(lane, StreamLane) for event in lane.take_passed()]

    def join_host(self) -> None:
        """Block until all work of the CPU's lanes has ended; see `join`."""
        for lane in tuple(self._host.values()):
            lane.join()

    def join(self) -> None:
        """Block until all work has ended; raise the exception of work that failed.

        Raises:
            EngineLostError: a stage did not end.
        """
        for lane in self._all:
            lane.join()

    def abandon(self, error: BaseException | None = None) -> EngineLostError | None:
        """Drop what has not begun and block until the rest has ended, whether or not it fails.

        Args:
            error: that led here, if one did. After a stall streams are waited for once more: their flags may
                have been raised meanwhile.

        Returns:
            Why nothing can be done any more: it, or what does not end now; None: all can be used again.
        """
        for lane in self._all:
            lane.cancel()
        may_end = isinstance(error, DeviceStalledError)
        lost = error if isinstance(error, EngineLostError) and not may_end else None
        for lane in self._all:
            if isinstance(lost, DeviceLostError):
                break  # threads wait for it in vain, too
            try:
                lane.join()
            except EngineLostError as another:
                lost = lost or another
            except Exception:
                pass
        return lost

    def close(self) -> None:
        """End all threads, also in the middle of an iteration. May be called again, from any thread."""
        with self._changes:
            self._is_stopped = True
        for lane in self._all:  # first all: work may wait for another lane's
            lane.stop()
        for lane in self._all:
            lane.close()
