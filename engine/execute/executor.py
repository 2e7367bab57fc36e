"""The interface between the engine and the executor of its plans."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from neo_desktop.engine.batch import IterationPlan, IterationResult

Wait = Callable[[], IterationResult]


class Executor(ABC):
    """An executor of plans, one after the other; tests use a fake."""

    @abstractmethod
    def start(self, plan: IterationPlan) -> Wait:
        """Start an iteration, and return a function that waits for its result; call it once.

        A GPU computes meanwhile; without a GPU, the wait itself computes. The caller waits for the result
        before it starts the next iteration, unless the executor `runs_ahead`.

        If this method or the wait raises, no part of the iteration is still in flight, and the next iteration
        can start.

        Raises:
            DeviceMemoryError: The device has too little memory for this plan now; the wait may also raise it.
            RuntimeError: The executor is closed or gets closed; the wait may also raise it.
        """

    @property
    def runs_ahead(self) -> bool:
        """True if an iteration can start or be prepared while another one is in flight.

        Tokens of the iteration in flight are `UNKNOWN_TOKEN` in the next plan. Both plans must stay on the
        device if the next one starts.
        """
        return False

    def prepare(self, plan: IterationPlan) -> None:  # noqa: B027  only saves time
        """Prepare for a plan while another iteration is in flight; `start` probably gets it next."""

    def watch(self, alarm: Callable[[], object]) -> None:  # noqa: B027  most executors have nothing to watch
        """Register a callback for a `loss` between iterations; any thread may call it."""

    @property
    def loss(self) -> Exception | None:
        """The error that prevents all further execution, if it is known without trying."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all background work for good. May be called again."""

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Start one iteration and wait for its result."""
        return self.start(plan)()
