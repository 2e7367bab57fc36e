"""The stages of an iteration in parts: which of them a graph can hold, and which not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from neo_desktop.engine.execute.lane import Lane, Launcher, Work
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.stages import Step, Sum

Record = Callable[[Launcher], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Some stages in a row.

    Fixed ones depend on nothing but the sizes of the iteration: as a graph they serve the next one, too. They
    wait for no signal of a part that is not fixed, and no part that is not fixed waits for theirs: between
    two parts everything has passed the device's lane.
    """

    is_fixed: bool
    records: tuple[Record, ...]

    def __call__(self, launcher: Launcher) -> None:
        """Give the stages to their lanes."""
        for record in self.records:
            record(launcher)


@dataclass
class PartBuilder:
    """Puts stages that follow each other into as few parts as possible."""

    parts: list[Part] = field(default_factory=list)

    def add(self, record: Record, *, is_fixed: bool) -> None:
        """Add stages to the end."""
        if self.parts and self.parts[-1].is_fixed == is_fixed:
            before = self.parts.pop()
            self.parts.append(Part(is_fixed, (*before.records, record)))
        else:
            self.parts.append(Part(is_fixed, (record,)))

    def add_work(self, stage: Stage, work: Work, *, is_fixed: bool) -> None:
        """Add work of the device to the end."""
        self.add(partial(_run, stage, work), is_fixed=is_fixed)

    def add_steps(self, stage: Stage, steps: Iterable[Step], *, is_fixed: bool) -> None:
        """Add steps, and the sums over ranks between them, which are never fixed."""
        for step in steps:
            if step.work is not None:
                self.add_work(stage, step.work, is_fixed=is_fixed)
            if isinstance(step.product, Sum):
                self.add_work(stage._replace(name="sum"), step.product, is_fixed=False)


def _run(stage: Stage, work: Work, launcher: Launcher) -> None:
    launcher.run(Lane.DEVICE, stage, work)
