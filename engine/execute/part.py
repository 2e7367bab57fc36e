"""Division of an iteration's stages into parts: fixed parts can be graphs, others cannot."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from neo_desktop.engine.execute.lane import Lane, Launcher, Work
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.ops import DividedExperts, Product
from neo_desktop.models.stages import Step

Record = Callable[[Launcher], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive stages.

    A fixed part depends only on the sizes of the iteration, so its graph also serves later iterations.
    Signals do not cross between fixed and other parts: all work of a part passes the device's lane before the
    next part.
    """

    is_fixed: bool
    records: tuple[Record, ...]

    def __call__(self, launcher: Launcher) -> None:
        """Submit the stages to their lanes."""
        for record in self.records:
            record(launcher)


@dataclass
class PartBuilder:
    """A builder that merges consecutive stages into as few parts as possible."""

    parts: list[Part] = field(default_factory=list)

    def add(self, record: Record, *, is_fixed: bool) -> None:
        """Append stages."""
        if self.parts and self.parts[-1].is_fixed == is_fixed:
            before = self.parts.pop()
            self.parts.append(Part(is_fixed, (*before.records, record)))
        else:
            self.parts.append(Part(is_fixed, (record,)))

    def add_work(self, stage: Stage, work: Work, *, is_fixed: bool) -> None:
        """Append work of the device."""
        self.add(partial(_run, stage, work), is_fixed=is_fixed)

    def add_steps(self, stage: Stage, steps: Iterable[Step], *, is_fixed: bool) -> None:
        """Append steps and the all-reduces between them, which are never fixed."""
        for step in steps:
            if step.work is not None:
                self.add_work(stage, step.work, is_fixed=is_fixed)
            if step.cut is not None:
                assert not isinstance(step.cut, Product | DividedExperts)  # ranks have no offloaded weights
                self.add_work(stage._replace(name="sum"), step.cut, is_fixed=False)


def _run(stage: Stage, work: Work, launcher: Launcher) -> None:
    launcher.run(Lane.DEVICE, stage, work)
