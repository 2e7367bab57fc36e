"""Experts that move between host memory and slots on the device.

Host memory holds all experts of a layer that has slots. The device's slots hold some, in the device's own
format:

    places      | slots of the device    | experts in host memory alone, by number |
                0                        num_slots                                 count, or less

A table in device memory has each expert's place, so graphs find every expert. A slot whose content
changes is free: no expert has its place.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.models.linear.dense import Plain
from neo_desktop.models.linear.offloaded import MoveBudget, OffloadedLinear, Piece
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.linear.unpack import regroup

LayerMatrices = tuple[OffloadedLinear, OffloadedLinear, OffloadedLinear]
"""A layer's gates, ups and downs."""


class LayerSlots:
    """The slots of a layer; `index`: among those with slots.

    Args:
        places: [count] int32 on the device.
        slots: [count], an expert's slot; -1: in host memory alone.
    """

    def __init__(
        self, index: int, matrices: LayerMatrices, count: int, places: Tensor, slots: NDArray[np.int32]
    ) -> None:
        self.index = index
        self._matrices = dict.fromkeys(matrices)  # gates and ups may be one matrix
        self._count, self._places, self._slots = count, places, slots
        gate = matrices[0]
        self.num_slots = gate.resident_rows * count // gate.rows
        self.expert_bytes = sum(len(piece.packed) for _, piece in self._pieces(0))

    @property
    def on_host(self) -> list[int]:
        """The experts in host memory alone, in the order of their places."""
        return np.flatnonzero(self._slots < 0).tolist()

    def places_of(self, ids: Tensor) -> Tensor:
        return self._places.index_select(0, ids.flatten()).view_as(ids)

    def fill(self, slot: int, expert: int, staged: Tensor) -> None:
        """Copy an expert to a slot, in the order of the current stream.

        `staged` is scratch, [at least expert_bytes] uint8 on the device.
        """
        for split, piece in self._pieces(expert):
            packed = staged[: len(piece.packed)]
            packed.copy_(piece.packed, non_blocking=True)
            rows = piece.rows.stop - piece.rows.start
            _fill(split, slice(slot * rows, (slot + 1) * rows), piece, packed)

    def _pieces(self, expert: int) -> Iterator[tuple[OffloadedLinear, Piece]]:
        for split in self._matrices:
            rows = split.rows // self._count
            (piece,) = split.pieces_of(slice(expert * rows, (expert + 1) * rows), rows)
            yield split, piece


class ExpertSlots:
    """The slots of a model's layers; `count`: number of experts of a layer."""

    def __init__(
        self, layers: Sequence[LayerMatrices], count: int, budget: MoveBudget, device: torch.device
    ) -> None:
        self.budget = budget
        self.places = torch.empty(len(layers), count, dtype=torch.int32, device=device)
        self.slots = np.empty((len(layers), count), np.int32)
        """An expert's slot, [layers, count]; -1: in host memory alone."""
        self.layers = [
            LayerSlots(index, matrices, count, self.places[index], self.slots[index])
            for index, matrices in enumerate(layers)
        ]
        self._of_gates: dict[Linear, LayerSlots] = {
            matrices[0]: layer for matrices, layer in zip(layers, self.layers, strict=True)
        }
        self.version = 0  # changes with the order of experts in host memory
        self._num_slots = np.array([[layer.num_slots] for layer in self.layers], np.int32)
        numbers = np.arange(count, dtype=np.int32)
        self.place(np.where(numbers < self._num_slots, numbers, -1))
        self.places.copy_(torch.from_numpy(self.all_places()))

    def of(self, gate: Linear) -> LayerSlots | None:
        """Return the slots of the layer with these gates; None: it has none."""
        return self._of_gates.get(gate)

    @property
    def num_slots(self) -> Sequence[int]:
        return [layer.num_slots for layer in self.layers]

    def place(self, slots: NDArray[np.int32]) -> None:
        """Take in the experts' slots, [layers, count]; the caller copies `all_places` to the device."""
        self.slots[:] = slots
        self.version += 1

    def all_places(self) -> NDArray[np.int32]:
        """Return the experts' places, [layers, count]."""
        others = self.slots < 0
        after = self._num_slots - 1 + np.cumsum(others, axis=1, dtype=np.int32)
        return np.where(others, after, self.slots)


def expert_slots(
    layers: Iterable[tuple[Linear, Linear, Linear]],
    count: int,
    budget: MoveBudget | None,
    device: torch.device,
) -> ExpertSlots | None:
    """Return the slots of a model's layers, given each layer's matrices; None: no experts move."""
    found = [
        (gate, up, down)
        for gate, up, down in layers
        if isinstance(gate, OffloadedLinear)
        and isinstance(up, OffloadedLinear)
        and isinstance(down, OffloadedLinear)
        and gate.has_slots
    ]
    return None if budget is None or not found else ExpertSlots(found, count, budget, device)


def _fill(split: OffloadedLinear, rows: slice, piece: Piece, packed: Tensor) -> None:
    resident = split.resident
    if isinstance(resident, PackedMatrix):
        resident.packed_parts[0].tiles_of(rows).copy_(packed)
    elif isinstance(resident, QuantisedOnGPU):
        regroup(packed, resident.parts[0], rows)
    else:
        assert isinstance(resident, Plain)
        split.unpack(piece.part, packed, resident.weight[rows])
    if resident.bias is not None and split.bias is not None:
        resident.bias[rows].copy_(split.bias[piece.rows])
