"""Mixtures of experts: which of them a token takes, and what they make of it.

On a CPU with packed weights that is one native call, for which rows are grouped by expert. Elsewhere
operators of torch do it without reading back which experts were chosen, so that CUDA graphs can hold it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.expert_operators import ROWS_AT_ONCE, ExpertScratch, ids_among
from neo_desktop.models.expert_pieces import ExpertPiece, expert_pieces
from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.stacked import StackedExperts, stacked
from neo_desktop.models.operators import Operators

# x, ids, weights, room, out: see `expert_operators.multiply_experts`.
Multiply = Callable[[Tensor, Tensor, Tensor, ExpertScratch, Tensor], None]
_Matrices = tuple[OffloadedLinear, OffloadedLinear, OffloadedLinear]


class MoE:
    """A layer's experts, and the choice among them.

    Some of them, the last ones, may lie in host memory. Of these the first come to the device for a product,
    and the CPU computes what the others make.

    Args:
        weights: of all of them.
        config: what they are.
        operators: of the device.
    """

    def __init__(self, weights: Experts, config: ExpertsConfig, operators: Operators) -> None:
        self._router, self._config, self._operators = weights.router, config, operators
        self._num_resident = config.count
        self._split: _Matrices | None = None
        self.on_host: native.PackedExperts | None = None
        self._on_device: Multiply | None = None
        gate, up, down = weights.gate, weights.up, weights.down
        if (
            isinstance(gate, OffloadedLinear)
            and isinstance(up, OffloadedLinear)
            and isinstance(down, OffloadedLinear)
        ):
            self._num_resident = resident = gate.resident_rows // config.intermediate_size
            whole = resident * config.intermediate_size, resident * (down.rows // config.count)
            if (gate.resident_rows, down.resident_rows) != whole or up.resident_rows != gate.resident_rows:
                raise ValueError("a part of an expert lies on the device, and a part in host memory")
            self._split = gate, up, down
            of_host = gate.host.native, up.host.native, down.host.native
            self.on_host = native.packed_experts(config.count - resident, *of_host, _clamped(config.clamped))
            if gate.resident is None or up.resident is None or down.resident is None:
                return
            gate, up, down = gate.resident, up.resident, down.resident
        self._on_device = multiply_of((gate, up, down), self._num_resident, config.clamped, operators)

    @property
    def has_device_part(self) -> bool:
        """Whether the device has some of the experts."""
        return self._on_device is not None

    @property
    def num_on_host(self) -> int:
        """How many lie in host memory."""
        return self._config.count - self._num_resident

    def pieces(self, streamed: int, dtype: torch.dtype) -> list[ExpertPiece]:
        """Return what comes to the device, in order.

        Args:
            streamed: how many of the experts in host memory.
            dtype: of the model.
        """
        if self._split is None:
            return []
        return expert_pieces(self._split, self._config.count, streamed, dtype)

    def route(self, x: Tensor, room: ExpertScratch) -> None:
        """Choose experts for x `[n, hidden]`.

        Args:
            x: of the device.
            room: where the choice goes.
        """
        logits = self._router.multiply(x, room.logits)
        ids, weights, _ = room.choice
        self._operators.choose_experts(logits, self._config.normalises, ids, weights)

    def find_host_ids(self, room: ExpertScratch, streamed: int) -> None:
        """Say of the choice which of the experts in host memory they are; -1: none of the CPU's.

        Args:
            room: with the choice.
            streamed: how many of the experts in host memory come to the device.
        """
        own = ids_among(room.choice.ids, self._num_resident, self.num_on_host)
        room.choice.host_ids.copy_(torch.where(own < streamed, -1, own))

    def multiply_on_device(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put what the device's experts make of x into `out` `[n, hidden]`, which is not x."""
        assert self._on_device is not None
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ids, weights, _ = room.choice.rows(rows)
            if self.on_host is not None:
                ids = ids_among(ids, 0, self._num_resident)
            self._on_device(x[rows], ids, weights, room.first(len(x[rows])), out[rows])

    def multiply_piece(
        self,
        piece: ExpertPiece,
        staged: Tensor,
        numbers: Tensor,
        x: Tensor,
        room: ExpertScratch,
        out: Tensor,
        *,
        adds: bool,
    ) -> None:
        """Compute on the device what streamed experts make of x.

        Args:
            piece: one of `pieces`.
            staged: its bytes on the device, `[bytes]` uint8.
            numbers: `[at least piece.elements]` on the device, of the model's dtype: scratch.
            x: [n, hidden]
            room: with the choice.
            out: [n, hidden], not x.
            adds: whether it is added to what is there.
        """
        experts = piece.unpacked(staged, numbers, self._config.clamped)
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ids, weights, _ = room.choice.rows(rows)
            own, of_rows = ids_among(ids, piece.first, piece.count), room.first(len(x[rows]))
            self._operators.multiply_experts(experts, x[rows], own, weights, of_rows, out[rows], adds)

    def multiply_on_host(
        self, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor
    ) -> None:
        """Put what the others make of x into `out`; all lies in host memory.

        Args:
            x: [n, hidden]
            ids: [n, per token] int32: which of the others; -1: none.
            weights: [n, per token] float32
            room: of at least as many rows.
            out: [n, hidden]
        """
        assert self.on_host is not None
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            of_rows = room.first(len(x[rows]))
            scratch = of_rows.gate_up, of_rows.gated, of_rows.products
            native.multiply_experts(self.on_host, x[rows], ids[rows], weights[rows], *scratch, out[rows])

    def apply(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put what the network makes of x `[n, hidden]` into `out` `[n, hidden]`, which is not x.

        All experts lie on the device.
        """
        assert self.on_host is None
        self.route(x, room)
        self.multiply_on_device(x, room, out)


def moe_layers(decoder: Decoder, operators: Operators) -> dict[int, MoE]:
    """Return `layer -> its experts`, of the layers that have some."""
    config, layers = decoder.config.experts, enumerate(decoder.layers)
    if config is None:
        return {}
    return {
        index: MoE(layer.mlp, config, operators) for index, layer in layers if isinstance(layer.mlp, Experts)
    }


def _clamped(gate: ClampedGate | None) -> tuple[float, float] | None:
    return None if gate is None else (gate.alpha, gate.limit)


def multiply_of(
    matrices: tuple[Linear, Linear, Linear], count: int, clamped: ClampedGate | None, operators: Operators
) -> Multiply:
    """Return what multiplies rows with the experts that they chose.

    Args:
        matrices: gates, ups and downs of all of them.
        count: how many there are.
        clamped: see `ExpertsConfig`.
        operators: of the device.
    """
    gate, up, down = matrices
    if isinstance(gate, PackedMatrix) and isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
        packed = native.packed_experts(count, gate.native, up.native, down.native, _clamped(clamped))

        def by_native(x: Tensor, ids: Tensor, shares: Tensor, room: ExpertScratch, out: Tensor) -> None:
            native.multiply_experts(packed, x, ids, shares, room.gate_up, room.gated, room.products, out)

        return by_native
    of_each = StackedExperts(count, stacked(gate, count), stacked(up, count), stacked(down, count), clamped)
    return lambda *arguments: operators.multiply_experts(of_each, *arguments)
