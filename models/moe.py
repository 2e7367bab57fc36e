"""Mixtures of experts: routing, and the experts' feed-forward networks.

On a CPU with packed weights this is one native call that groups rows by expert. Elsewhere torch operators do
it without reading the routing back to the host, so CUDA graphs can capture them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.expert_operators import ExpertScratch, ids_among, passes
from neo_desktop.models.expert_pieces import ExpertPiece, expert_pieces
from neo_desktop.models.expert_slots import LayerMatrices, LayerSlots
from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig, Gating
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.stacked import StackedExperts, stacked
from neo_desktop.models.operators import Operators

# x, ids, weights, room, out: see `expert_operators.multiply_experts`.
Multiply = Callable[[Tensor, Tensor, Tensor, ExpertScratch, Tensor], None]
Matrices = tuple[Linear, Linear, Linear]
"""A layer's gates, ups and downs, each with the experts' stacked; gates and ups may be one object."""


class MoE:
    """A layer's mixture of experts.

    Some experts may be in host memory. Per matmul, the first of these are streamed to the device, and the CPU
    computes the others. Places order the experts: first those on the device, then those in host memory.

    Args:
        router: None: the caller selects the experts.
        slots: of the layer's experts; None: a place is the expert's number.
    """

    def __init__(
        self,
        matrices: Matrices,
        config: ExpertsConfig,
        operators: Operators,
        *,
        router: Linear | None = None,
        slots: LayerSlots | None = None,
    ) -> None:
        self._router, self._config, self._operators = router, config, operators
        self.slots = slots
        self._num_resident = config.count
        self._split: LayerMatrices | None = None
        self.on_host: native.PackedExperts | None = None
        self._on_device: Multiply | None = None
        gate, up, down = matrices
        if (
            isinstance(gate, OffloadedLinear)
            and isinstance(up, OffloadedLinear)
            and isinstance(down, OffloadedLinear)
        ):
            self._num_resident = resident = gate.resident_rows // config.intermediate_size
            whole = resident * config.intermediate_size, resident * (down.rows // config.count)
            if (gate.resident_rows, down.resident_rows) != whole or up.resident_rows != gate.resident_rows:
                raise ValueError("an expert is divided between device and host memory")
            self._split = gate, up, down
            host_matrices = gate.host.native, up.host.native, down.host.native
            self._first_on_host = 0 if slots is not None else resident
            self.on_host = _packed(config.count - self._first_on_host, *host_matrices, config.gating)
            if gate.resident is None or up.resident is None or down.resident is None:
                return
            gate, up, down = gate.resident, up.resident, down.resident
        count = self._num_resident
        if isinstance(gate, PackedMatrix) and isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
            packed = _packed(count, gate.native, up.native, down.native, config.gating)
            self._on_device = partial(_multiply_packed, packed)
            return
        gates = stacked(gate, count)
        ups = gates if up is gate else stacked(up, count)
        experts = StackedExperts(count, gates, ups, stacked(down, count), config.gating)
        self._on_device = lambda *arguments: operators.multiply_experts(experts, *arguments)

    @property
    def has_device_part(self) -> bool:
        """True if some experts are on the device."""
        return self._on_device is not None

    @property
    def num_on_host(self) -> int:
        """Number of experts that are not on the device."""
        if self.slots is not None:
            return len(self.slots.on_host)
        return self._config.count - self._num_resident

    def scratch(self, x: Tensor) -> ExpertScratch:
        """Allocate scratch memory for x `[n, hidden]`."""
        return ExpertScratch.empty(len(x), self._config, x.shape[1], x.dtype, x.device)

    def pieces(self, streamed: int, dtype: torch.dtype) -> list[ExpertPiece]:
        """Return the pieces to stream to the device, in order; `streamed`: number of host experts."""
        if self._split is None:
            return []
        experts = range(streamed) if self.slots is None else self.slots.on_host[:streamed]
        matrices = tuple(dict.fromkeys(self._split))
        return expert_pieces(matrices, self._config.count, self._num_resident, experts, dtype)

    def route(self, x: Tensor, room: ExpertScratch) -> None:
        """Select experts for x `[n, hidden]` on the device; `room` receives the routing."""
        assert self._router is not None
        logits = self._router.multiply(x, room.logits)
        ids, weights, _ = room.choice
        self._operators.choose_experts(logits, self._config.normalises, ids, weights)

    def find_host_ids(self, room: ExpertScratch, streamed: int) -> None:
        """Write the indices of the CPU's experts to the routing's `host_ids`; -1: not computed by the CPU.

        The first `streamed` experts in host memory are not computed by the CPU.
        """
        ids = room.choice.ids
        is_cpus = self._places(ids) >= self._num_resident + streamed
        room.choice.host_ids.copy_(torch.where(is_cpus, ids - self._first_on_host, -1))

    def _places(self, ids: Tensor) -> Tensor:
        return ids if self.slots is None else self.slots.places_of(ids)

    def multiply_on_device(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Write the results of the device's experts to `out` `[n, hidden]`, which must not alias x."""
        assert self._on_device is not None
        ids, weights, _ = room.choice
        for some, own, shares, scratch, into in passes(x, ids, weights, room, out):
            among = own if self.on_host is None else ids_among(self._places(own), 0, self._num_resident)
            self._on_device(some, among, shares, scratch, into)

    def multiply(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Compute all experts, the device's before the CPU's; arguments as in `multiply_on_device`."""
        if self.has_device_part:
            self.multiply_on_device(x, room, out)
        else:
            out.zero_()
        if self.on_host is None:
            return
        self.find_host_ids(room, 0)
        x = x.contiguous().cpu()
        product, ids, weights = torch.empty_like(x), room.choice.host_ids.cpu(), room.choice.weights.cpu()
        for some in passes(x, ids, weights, self.scratch(x), product):
            _multiply_packed(self.on_host, *some)
        out.add_(product.to(out.device))

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
        """Compute streamed experts on the device.

        Args:
            piece: one of `pieces`.
            staged: its bytes on the device, `[bytes]` uint8.
            numbers: `[at least piece.elements]` on the device, in the model's dtype: scratch.
            x: [n, hidden]; out: the same, must not alias x. It is overwritten, or added to.
            room: has the routing.
        """
        experts = piece.unpacked(staged, numbers, self._config.gating)
        ids, weights, _ = room.choice
        for some, own, shares, scratch, into in passes(x, ids, weights, room, out):
            among = ids_among(self._places(own), piece.first, piece.count)
            self._operators.multiply_experts(experts, some, among, shares, scratch, into, adds)


def moe_layers(decoder: Decoder, operators: Operators) -> dict[int, MoE]:
    """Return layer -> MoE, for the layers with experts."""
    config, found = decoder.config.experts, {}
    for index, layer in enumerate(decoder.layers):
        if config is not None and isinstance(mlp := layer.mlp, Experts):
            matrices, slots = (mlp.gate, mlp.up, mlp.down), decoder.slots_of(mlp.gate)
            found[index] = MoE(matrices, config, operators, router=mlp.router, slots=slots)
    return found


def _packed(
    count: int, gate: native.Matrix, up: native.Matrix, down: native.Matrix, gating: Gating
) -> native.PackedExperts:
    clamped = (gating.alpha, gating.limit) if isinstance(gating, ClampedGate) else None
    name = "silu" if isinstance(gating, ClampedGate) else gating
    return native.packed_experts(count, gate, up, down, clamped, gate_by=name)


def _multiply_packed(
    packed: native.PackedExperts, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor
) -> None:
    native.multiply_experts(packed, x, ids, weights, room.gate_up, room.gated, room.products, out)
