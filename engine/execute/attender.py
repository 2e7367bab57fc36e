"""The interface between an iteration's loop over layers and the techniques that attend or move KV."""

from collections.abc import Hashable, Sequence

from neo_desktop.engine.execute.lane import HostTask, Launcher, Signal
from neo_desktop.engine.execute.layout import BatchMembers


class Attender:
    """An iteration's work beside the linear stages: attention of some rows, or copies of KV.

    In each layer, the loop calls `fetch` one layer ahead, `fetched`, `attend` after the linear stages,
    `release`, and `collect` before the next linear stages. The base class does nothing.
    """

    is_capturable = True  # False: attention depends on more than the iteration's sizes
    fetches = False  # True: `fetch` submits work that no graph contains
    spans_layers = False  # True: its copies flow through all layers, so one graph contains all layers or none
    key: Hashable = None  # its graphs depend on this, besides the iteration's sizes
    tasks: Sequence[HostTask] = ()  # work of the CPU or a worker, in the device's order

    def fill(self, members: BatchMembers) -> None:
        """Take the sequences of an iteration of the same sizes; the attender of a graph serves many."""

    def fetch(self, launcher: Launcher, layer: int) -> None:
        """Start the copies that a layer needs."""

    def fetch_all(self, launcher: Launcher) -> None:
        """Start the copies for every layer; the iteration has no attender that `fetches`."""

    def fetched(self, layer: int) -> Sequence[Signal]:
        """Return the signals of the copies that the layer's linear stages wait for."""
        return ()

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        """Submit a layer's attention.

        Args:
            linear: The end of the linear stages, which made q, k and v.

        Returns:
            The signals that later work of the device waits for.
        """
        return ()

    def release(self, launcher: Launcher, layer: int) -> None:
        """Release a layer's buffers after all attention to it was submitted."""

    def collect(self, launcher: Launcher, layer: int) -> Sequence[Signal]:
        """Submit copies of a layer's attention output; return the signals that the next stage waits for."""
        return ()

    def copied(self) -> tuple[float, float, int]:
        """Return the ms of the copies, the ms of the device's waits, and the number of copied tokens."""
        return 0.0, 0.0, 0

    def commit(self) -> None:
        """Finish a successful iteration."""
