"""Choice of the experts of MoE layers that are on the device: experts asked for again, within a bus budget.

A layer has a fixed number of slots on the device, and host memory holds all of its experts. The CPU computes
an expert without a slot. If it is asked for again, it takes the slot of the layer's least recently used
expert, provided that that one was not asked for in between.

These places are planned, whether or not experts move, and compared with the first ones, which never change.
Experts move only while the planned places serve more choices, and these are worth the copies.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes, product_time
from neo_desktop.models.linear.offloaded import MoveBudget

WINDOW = 128  # iterations that the comparison remembers
# Gains at which experts begin to move, and stop, as shares of the chosen experts: smaller ones may be noise.
BEGIN, STOP = 0.02, 0.01
STORED_PASSES = 3  # the GPU writes received experts, reads them, and writes them to their slots
BUS_SHARE = 0.5  # of an iteration's time, for copies of experts
MOST_MOVES = 32  # per iteration; each takes launches on the engine's thread

_NEVER = np.iinfo(np.int32).max


def move_budget(rates: Rates, experts: Iterable[tuple[Sizes, int]]) -> MoveBudget:
    """Return the budget of an iteration, beside the experts of one row.

    Args:
        experts: of every MoE layer, with the number of experts on the device.
    """
    seconds = read = 0.0
    for sizes, resident in experts:
        seconds += product_time(rates, sizes, resident, 1, 0.0).ms / 1e3
        read += sizes.used(resident) * sizes.host_bytes
    most = BUS_SHARE * seconds * rates.bus_bytes_per_s
    free = min(max(seconds * rates.host_bytes_per_s - read, 0.0), most)
    return MoveBudget(most, free, STORED_PASSES * rates.cpu_bytes_per_s / rates.gpu_bytes_per_s)


class Move(NamedTuple):
    """The copy of an expert to a slot."""

    layer: int  # index among the MoE layers with slots
    expert: int
    slot: int


class ExpertPlaces:
    """The places of experts in all layers with slots.

    Args:
        slots: per layer and expert, its slot; -1: in host memory alone.
        num_slots: per layer; the first places are those of the first experts.
        expert_bytes: per layer, of one expert in host memory.
    """

    def __init__(
        self,
        slots: NDArray[np.int32],
        num_slots: Sequence[int],
        expert_bytes: Sequence[int],
        budget: MoveBudget,
    ) -> None:
        layers, self._count = slots.shape
        self._bytes, self._budget = np.asarray(expert_bytes, np.int64), budget
        self.slots = slots.copy()
        # Per layer, slots without an expert.
        self._free = [set(range(num)) - set(own.tolist()) for num, own in zip(num_slots, slots, strict=True)]
        self._first = np.tile(np.arange(self._count), (layers, 1)) < np.asarray(num_slots)[:, None]
        self._now = 0
        self._last = np.zeros(slots.shape, np.int32)  # iteration of the last use; 0: none
        self._uses = np.where(self._first, self._last, _NEVER)  # the same; _NEVER: its place is not planned
        self._gain = self._chosen = self._copied = 0.0  # bytes per iteration, see `_compare`
        self.moves_experts = False  # True while planned places are better than the first ones

    def record(self, asked: NDArray[np.bool_]) -> None:
        """Take in the experts that an iteration's rows chose, [layers, experts]."""
        self._now += 1
        chosen = np.flatnonzero(asked)  # much faster than `nonzero` of two dimensions
        before, planned = self._last.take(chosen), self._uses.take(chosen) < _NEVER
        layers = chosen // self._count
        nbytes = self._bytes[layers]
        gain = nbytes[planned].sum() - nbytes[self._first.take(chosen)].sum()
        self._last.put(chosen, self._now)
        self._uses.put(chosen[planned], self._now)
        again = ~planned & (before > self._uses.min(1)[layers])
        copied = self._plan(chosen[again], before[again])
        self._compare(float(gain), float(nbytes.sum()), copied)

    def _plan(self, again: NDArray[np.intp], before: NDArray[np.int32]) -> float:
        """Change the planned places; return the bytes of the copies.

        Args:
            again: indices of chosen experts in the flat order of layers and experts;
            before: their last uses before this iteration.
        """
        copied, num_copies, sizes = 0, 0, self._bytes.tolist()
        order = np.argsort(-before, kind="stable")
        for index, last in zip(again[order].tolist(), before[order].tolist(), strict=True):
            layer, expert = divmod(index, self._count)
            uses = self._uses[layer]
            oldest = uses.argmin()
            if uses[oldest] >= last:
                continue
            if num_copies == MOST_MOVES or copied + sizes[layer] > self._budget.most:
                break
            uses[oldest], uses[expert] = _NEVER, self._now
            copied, num_copies = copied + sizes[layer], num_copies + 1
        return copied

    def _compare(self, gain: float, chosen: float, copied: float) -> None:
        """Compare the planned places with the first ones, by the mean of recent iterations.

        Args:
            gain: bytes that the CPU need not read with the planned places, but reads with the first.
            chosen: bytes of the chosen experts.
            copied: bytes of the copies to the planned places.
        """
        rate = 1 / WINDOW
        self._gain += rate * (gain - self._gain)
        self._chosen += rate * (chosen - self._chosen)
        self._copied += rate * (copied - self._copied)
        price = self._budget.price * self._copied + max(self._copied - self._budget.free, 0.0)
        self.moves_experts = self._gain - price > (STOP if self.moves_experts else BEGIN) * self._chosen

    def moves(self) -> list[Move]:
        """Return the next copies towards the better places.

        Their slots are free from now on; `finish` ends the copies.
        """
        wanted = self._uses < _NEVER if self.moves_experts else self._first
        missing = self._recent(wanted & (self.slots < 0))[:MOST_MOVES]
        missing = missing[np.cumsum(self._bytes[missing // self._count]) <= self._budget.most]
        if not len(missing):
            return []
        leaving = defaultdict[int, list[int]](list)  # layer -> experts, the least recently used one last
        for index in self._recent((self.slots >= 0) & ~wanted).tolist():
            leaving[index // self._count].append(index % self._count)
        pairs = (divmod(index, self._count) for index in missing.tolist())
        return [Move(layer, expert, self._take_slot(layer, leaving)) for layer, expert in pairs]

    def _recent(self, some: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the flat indices of some experts, the most recently used one first."""
        found = np.flatnonzero(some)
        return found[np.argsort(-self._last.take(found), kind="stable")]

    def _take_slot(self, layer: int, leaving: Mapping[int, list[int]]) -> int:
        if self._free[layer]:
            return self._free[layer].pop()
        expert = leaving[layer].pop()
        slot, self.slots[layer, expert] = int(self.slots[layer, expert]), -1
        return slot

    def finish(self, moves: Iterable[Move], *, arrived: bool) -> None:
        """End copies: the experts are in their slots, or the slots stay free because copies failed."""
        for move in moves:
            if arrived:
                self.slots[move.layer, move.expert] = move.slot
            else:
                self._free[move.layer].add(move.slot)
