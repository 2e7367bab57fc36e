"""What a lane is, and what those wait for who depend on its work."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.waiting import Watch

Work = Callable[[], object]


class Signal(Protocol):
    """The end of a piece of work."""

    def wait(self) -> None:
        """Block this thread until the work has ended; raise the work's exception if it failed."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on the stream from now on wait for the work; this thread waits only if it must."""
        ...


class Lane(Protocol):
    """What carries out tasks in order. One thread submits, cancels and joins; any thread may close."""

    def begin(self, watch: Watch) -> None:
        """Take what is to be waited with from now on, while nothing is under way."""
        ...

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        """Carry out `work` after all earlier tasks of this lane and after the signals."""
        ...

    def cancel(self) -> None:
        """Drop the tasks that have not begun; their signals fail."""
        ...

    def join(self) -> None:
        """Block until every task has ended or was dropped; raise the first exception among them.

        Raises:
            EngineLostError: a task did not end.
        """
        ...

    def stop(self) -> None:
        """Drop the tasks that have not begun and take no more; does not block."""
        ...

    def close(self) -> None:
        """Stop, and block until the lane has ended, if it does. May be called again."""
        ...
