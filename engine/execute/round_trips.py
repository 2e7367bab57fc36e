"""Programs of hand-overs alone: what trials check, and what the profiler and the self-test time.

device   |make|                       |make|
to-host        |send|
cpu                  |answer|
to-device                    |bring|
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.lane import HostStep, Lane, Launcher, Signal, Work
from neo_desktop.engine.execute.part import Part, Record
from neo_desktop.engine.execute.timeline import Stage


@dataclass(frozen=True, slots=True)
class SmallProgram:
    """A program of one fixed part."""

    key: object  # see `AnyProgram`
    record: Record

    def parts(self) -> Sequence[Part]:
        """Return it."""
        return (Part(is_fixed=True, records=(self.record,)),)


def nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """From the device to the CPU and back, as often as there are flags.

    Args:
        flags: see `native.relay.empty_flags`.
        make: the device's work before it hands over.
        send: copies what it made to host memory.
        answer: the CPU's work in a trip, where no flags tell somebody else to do it.
        bring: copies the answer to the device.
    """

    flags: Tensor
    make: Work = nothing
    send: Work = nothing
    answer: Callable[[int], object] = nothing
    bring: Work = nothing

    def program(self, key: object) -> SmallProgram:
        """Return a program of them, under this key."""
        return SmallProgram(key, self._record)

    def _record(self, launcher: Launcher) -> None:
        arrived: tuple[Signal, ...] = ()
        for trip in range(self.flags.shape[1]):
            stage = Stage("hand-off", trip, 0, 1)
            made = launcher.run(Lane.DEVICE, stage, self.make, arrived)
            sent = launcher.run(Lane.TO_HOST, stage, self.send, (made,))
            step = HostStep(partial(self.answer, trip), self.flags[:, trip])
            answered = launcher.host(Lane.CPU, stage, step, (sent,))
            arrived = (launcher.run(Lane.TO_DEVICE, stage, self.bring, (answered,)),)
        launcher.wait(arrived)
