"""Moves of experts to slots on the device, beside iterations.

Places change between iterations only. An expert that is to leave its slot has no place on the device from the
iteration on in which the slot is filled; the new expert has it from the next iteration on:

    iteration     |n                       |n + 1                   |
    places        |slot 3: expert 7        |slot 3: free            |slot 3: expert 9
    experts lane                           |expert 9 to slot 3|

So no iteration reads a slot while it is filled, and graphs read the table of places in device memory. The
device logs the chosen experts. They decide later moves, while the next iteration computes. Iterations of many
rows do not count, because they use nearly all experts. Nothing moves beside iterations that stream experts:
these need the bus, and their graphs contain the addresses of the experts in host memory.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty
from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.predict.expert_places import ExpertPlaces, Move
from neo_desktop.models.expert_slots import ExpertSlots, LayerSlots

REST = 500  # iterations without moves after one with moves failed, perhaps for lack of memory


class ExpertMoves:
    """The moves of a model's experts, and what the device's table of places shows.

    Args:
        turns: Turn and name in it -> layer, of the layers with slots.
        rows: For each sub-batch, the most rows of an iteration that counts.
        per_token: Experts of a row.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        turns: Mapping[tuple[int, str], LayerSlots],
        rows: Sequence[int],
        per_token: int,
    ) -> None:
        self._slots, self._turns, self._rows = slots, turns, rows
        device = slots.places.device
        expert_bytes = [layer.expert_bytes for layer in slots.layers]
        self._plan = ExpertPlaces(slots.slots, slots.num_slots, expert_bytes, slots.budget)
        self._moves: list[Move] = []  # of the last iteration, until it has succeeded
        self._logged: list[int] = []  # rows of the log that count in the current iteration
        self._rest = 0  # iterations without moves to come
        self._chosen: NDArray[np.int32] | None = None  # [layers, any], of the last iteration that counted
        self._shown: int | None = None  # version of the device's table; None: unknown
        shape = len(slots.layers), sum(rows), per_token
        self._log = torch.empty(shape, dtype=torch.int32, device=device)
        self._read = host_empty(shape, torch.int32, device)
        self._places = host_empty(slots.places.shape, torch.int32, device)
        self._room = torch.empty(max(expert_bytes), dtype=torch.uint8, device=device)

    @property
    def version(self) -> int:
        """Changes with the order of the experts in host memory."""
        return self._slots.version

    def logs(self, index: int, rows: int) -> bool:
        """Return True if the log has room for the rows of a sub-batch."""
        return rows <= self._rows[index]

    def log_of(self, index: int, rows: int) -> Mapping[tuple[int, str], Tensor]:
        """Return the room for the chosen experts of a sub-batch, [rows, per token], by turn and name.

        Empty: there is no room.
        """
        if not self.logs(index, rows):
            return {}
        where = slice(first := sum(self._rows[:index]), first + rows)
        return {key: self._log[layer.index, where] for key, layer in self._turns.items()}

    def prepare(self, rows: Mapping[int, Sequence[int]], *, decides: bool) -> None:
        """Choose the moves of the next iteration; those of a failed one are given up.

        Args:
            rows: index of a sub-batch -> its rows without padding.
            decides: The iteration streams no experts, and all its rows are logged.
        """
        plan = self._plan
        if self._moves:  # their iteration has failed
            plan.finish(self._moves, arrived=False)
            self._rest = REST
        self._moves = plan.moves() if decides and not self._rest else []
        self._rest = max(self._rest - 1, 0)
        if not np.array_equal(self._slots.slots, plan.slots):
            self._slots.place(plan.slots)
            self._shown = None
        if self._shown is None:
            self._places.copy_(torch.from_numpy(self._slots.all_places()))
        logged = [sum(self._rows[:index]) + row for index, each in rows.items() for row in each]
        self._logged = logged if decides else []

    def begin(self, launcher: Launcher) -> None:
        """Submit what precedes the layers: the log is cleared, changed places go to the device."""
        launcher.run(Lane.DEVICE, Stage("log", 0, NO_SUB_BATCH, 0), partial(self._log.fill_, -1))
        if self._shown is None:
            copy = partial(self._slots.places.copy_, self._places, non_blocking=True)
            launcher.run(Lane.DEVICE, Stage("places", 0, NO_SUB_BATCH, 0), copy)

    def end(self, launcher: Launcher) -> None:
        """Submit what runs beside and after the layers, and prepare the next moves meanwhile."""
        for each in self._moves:
            fill = partial(self._slots.layers[each.layer].fill, each.slot, each.expert, self._room)
            launcher.run(Lane.EXPERTS, Stage("move", each.layer, NO_SUB_BATCH, 1), fill)
        if self._logged:
            copy = partial(self._read.copy_, self._log, non_blocking=True)
            launcher.run(Lane.DEVICE, Stage("log", 0, NO_SUB_BATCH, len(self._log)), copy)
        self._learn()

    def commit(self) -> None:
        """Finish a successful iteration."""
        self._shown = self._slots.version
        self._plan.finish(self._moves, arrived=True)
        self._moves = []
        if self._logged:
            self._chosen = self._read.numpy()[:, self._logged].reshape(len(self._slots.layers), -1)

    def _learn(self) -> None:
        """Take in the experts that the last iteration chose."""
        if self._chosen is None:
            return
        layers, count = self._plan.slots.shape
        asked = np.zeros((layers, count + 1), np.bool_)  # the last column takes -1: nothing logged
        np.put_along_axis(asked, self._chosen, True, axis=1)
        self._chosen = None
        self._plan.record(asked[:, :count])
