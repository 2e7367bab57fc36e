"""The CPU's work per layer of an iteration, or per turn between the attention of two layers."""

import time
from abc import ABC, abstractmethod
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.lane import HostStep, Lane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.native.relay import RelayItem


class HostWork(ABC):
    """The CPU's work for a sub-batch: step by step on a thread, or as a whole on a relay."""

    busy_ns: int  # CPU time, summed over layers

    @property
    def lane(self) -> str:
        """The lane that carries it out."""
        return Lane.CPU

    @property
    @abstractmethod
    def flags(self) -> Tensor:
        """Flags from `native.relay.empty_flags`."""

    @property
    @abstractmethod
    def arguments(self) -> RelayItem:
        """Description of the work for relays."""

    @abstractmethod
    def stage(self, layer: int) -> Stage:
        """Return the stage of a layer or turn, for timelines and messages."""

    @abstractmethod
    def carry_out(self, layer: int) -> None:
        """Do the work of a layer or turn."""

    def step(self, layer: int) -> HostStep:
        """Return the step of a layer or turn."""
        return HostStep(partial(self._timed, layer), self.flags[:, layer])

    def _timed(self, layer: int) -> None:
        started_ns = time.perf_counter_ns()
        self.carry_out(layer)
        self.busy_ns += time.perf_counter_ns() - started_ns
