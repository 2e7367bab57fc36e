"""What the CPU does in each layer of an iteration, or in each turn between the attention of two layers."""

import time
from abc import ABC, abstractmethod
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.lane import HostStep, Lane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.native.relay import RelayItem


class HostWork(ABC):
    """Work of a sub-batch: done by a thread step by step, or by a relay, which is told of all at once."""

    busy_ns: int  # how long the CPU has worked, in all layers

    @property
    def lane(self) -> str:
        """What carries it out."""
        return Lane.CPU

    @property
    @abstractmethod
    def flags(self) -> Tensor:
        """See `native.relay.empty_flags`."""

    @property
    @abstractmethod
    def arguments(self) -> RelayItem:
        """What relays are told."""

    @abstractmethod
    def stage(self, layer: int) -> Stage:
        """Return what is to be done in a layer, or in a turn, for people."""

    @abstractmethod
    def carry_out(self, layer: int) -> None:
        """Do it."""

    def step(self, layer: int) -> HostStep:
        """Return what is to be done in a layer, or in a turn."""
        return HostStep(partial(self._timed, layer), self.flags[:, layer])

    def _timed(self, layer: int) -> None:
        started_ns = time.perf_counter_ns()
        self.carry_out(layer)
        self.busy_ns += time.perf_counter_ns() - started_ns
