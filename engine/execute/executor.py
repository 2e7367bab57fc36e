"""What the engine asks of whatever carries out its plans."""

from typing import Protocol

from neo_desktop.engine.batch import IterationPlan, IterationResult


class Executor(Protocol):
    """Turns plans into results; tests put a fake one here."""

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Carry out one iteration."""
        ...

    def close(self) -> None:
        """End what runs in the background; nothing can be executed afterwards. May be called again."""
        ...
