"""Programs of round trips between device and CPU, for the self-check, the profiler and the self-test:

device   |make|                       |make|
to-host        |send|
cpu                  |answer|
to-device                    |bring|
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal, Step, Work
from neo_desktop.engine.execute.timeline import Stage


@dataclass(frozen=True, slots=True)
class SmallProgram:
    """A program of one capturable step."""

    key: object  # see `graphs.AnyProgram`
    submit: Callable[[Launcher], object]

    def steps(self) -> Sequence[Step]:
        return (Step(self.submit),)


def nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Round trips from the device to the CPU and back, one per pair of flags."""

    flags: Tensor  # see `native.relay.empty_flags`
    make: Work = nothing  # the device's work before each trip
    send: Work = nothing  # copies the device's result to host memory
    answer: Callable[[int], object] = nothing  # the CPU's work in a trip, if no relay does it
    bring: Work = nothing  # copies the answer to the device

    def program(self, key: object) -> SmallProgram:
        """Return a program of the round trips under this key."""
        return SmallProgram(key, self._record)

    def _record(self, launcher: Launcher) -> None:
        arrived: tuple[Signal, ...] = ()
        task = HostTask(Lane.CPU, partial(Stage, "offload", sub_batch=0, tokens=1), self.answer, self.flags)
        for trip in range(self.flags.shape[1]):
            stage = task.stage(trip)
            made = launcher.run(Lane.DEVICE, stage, self.make, arrived)
            sent = launcher.run(Lane.TO_HOST, stage, self.send, (made,))
            answered = launcher.host(task, trip, (sent,))
            arrived = (launcher.run(Lane.TO_DEVICE, stage, self.bring, (answered,)),)
        launcher.wait(arrived)
