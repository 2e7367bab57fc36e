"""What the engine asks of whatever carries out its plans."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from neo_desktop.engine.batch import IterationPlan, IterationResult

Wait = Callable[[], IterationResult]


class Executor(ABC):
    """Turns plans into results, one after the other; tests put a fake one here."""

    @abstractmethod
    def start(self, plan: IterationPlan) -> Wait:
        """Start an iteration, and return what waits for its result; called once.

        A device beside the caller computes meanwhile. Where there is none, waiting is what computes. The
        result is waited for before the next iteration starts, unless the executor `runs_ahead`.

        When this or the waiting raises, nothing of the iteration is still under way, and the next one can be
        started.

        Raises:
            DeviceMemoryError: the device has too little memory for this plan now; so does waiting.
            RuntimeError: the executor is closed, before or meanwhile; so does waiting.
        """

    @property
    def runs_ahead(self) -> bool:
        """Whether an iteration can be started now while one is under way, if both stay on the device.

        Tokens of the one under way are `UNKNOWN_TOKEN` in the plan of the next.
        """
        return False

    def watch(self, alarm: Callable[[], object]) -> None:  # noqa: B027  most have nothing to watch
        """Have something called, by any thread, once there is a `loss` though nothing is under way."""

    @property
    def loss(self) -> Exception | None:
        """Why nothing can be executed any more, as far as that is known without trying."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End what runs in the background; nothing can be executed afterwards. May be called again."""

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Carry out one iteration, for those who have nothing else to do meanwhile."""
        return self.start(plan)()
