"""The lane of an attention worker: it sends rows before earlier answers have arrived."""

from collections.abc import Sequence
from functools import partial

from neo_desktop.engine.execute.lane import HostLane, HostTask, Signal
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.watchdog import Watchdog


class WorkerLane(HostLane):
    """Two threads: one sends rows, the other receives the answers in the same order (Lamina, section 5.2).

        sends    |rows 0|        |rows 1|            |rows 0, next layer|
        worker          |attend to 0    |attend to 1     |attend to 0 ..
        takes                        |o 0|            |o 1|

    Each sub-batch has at most one layer's rows in flight, so at most two requests await an answer.

    Args:
        name: Name of the worker.
        timeline: Records the sends, and the waits for answers, from the send or the previous answer on.
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
