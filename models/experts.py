"""Mixtures of experts: which of them a token takes, and what they make of it.

On a CPU with packed weights that is one native call, for which rows are grouped by expert. Elsewhere
operators of torch do it without reading back which experts were chosen, so that CUDA graphs can hold it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.expert_operators import ROWS_AT_ONCE, ExpertScratch
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.split import Split
from neo_desktop.models.linear.stacked import StackedExperts, stacked
from neo_desktop.models.operators import Operators

# x, ids, weights, room, out: see `expert_operators.multiply_experts`.
Multiply = Callable[[Tensor, Tensor, Tensor, ExpertScratch, Tensor], None]


class Mixture:
    """A layer's experts, and the choice among them.

    Some of them may lie in host memory, where the CPU computes what they make.
    """

    def __init__(self, weights: Experts, config: ExpertsConfig, operators: Operators) -> None:
        self._router, self._config, self._operators = weights.router, config, operators
        self._num_resident = config.count
        self.on_host: native.PackedExperts | None = None
        self._on_device: Multiply | None = None
        gate, up, down = weights.gate, weights.up, weights.down
        if isinstance(gate, Split) and isinstance(up, Split) and isinstance(down, Split):
            self._num_resident = resident = gate.resident_rows // config.intermediate_size
            whole = resident * config.intermediate_size, resident * (down.rows // config.count)
            if (gate.resident_rows, down.resident_rows) != whole or up.resident_rows != gate.resident_rows:
                raise ValueError("a part of an expert lies on the device, and a part in host memory")
            of_host = gate.host.native, up.host.native, down.host.native
            self.on_host = native.packed_experts(config.count - resident, *of_host, _clamped(config))
            if gate.resident is None or up.resident is None or down.resident is None:
                return
            weights = Experts(weights.router, gate.resident, up.resident, down.resident)
        self._on_device = _multiply(weights, self._num_resident, config, operators)

    @property
    def has_device_part(self) -> bool:
        """Whether the device has some of the experts."""
        return self._on_device is not None

    def route(self, x: Tensor, room: ExpertScratch) -> None:
        """Choose experts for x `[n, hidden]`."""
        logits = self._router.multiply(x, room.logits)
        choice, resident = room.choice, self._num_resident
        ids, weights = choice.ids, choice.weights
        self._operators.choose_experts(logits, self._config.normalises, ids, weights)
        if self.on_host is None:
            return
        is_here = ids < resident
        choice.host_ids.copy_(torch.where(is_here, -1, ids - resident))
        choice.host_weights.copy_(weights)
        ids.copy_(torch.where(is_here, ids, 0))
        weights.copy_(torch.where(is_here, weights, 0))

    def multiply_on_device(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put what the device's experts make of x into `out` `[n, hidden]`, which is not x."""
        assert self._on_device is not None
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ids, weights, *_ = room.choice.rows(rows)
            self._on_device(x[rows], ids, weights, room.first(len(x[rows])), out[rows])

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
        """Put what the network makes of x `[n, hidden]` into `out` `[n, hidden]`, which is not x."""
        self.route(x, room)
        if self.has_device_part:
            self.multiply_on_device(x, room, out)
        if self.on_host is None:
            return
        on_host, ids, shares = x.cpu(), room.choice.host_ids.cpu(), room.choice.host_weights.cpu()
        made = torch.empty_like(on_host)
        scratch = room if x.device.type == "cpu" else room.in_host_memory()
        self.multiply_on_host(on_host, ids, shares, scratch, made)
        if self.has_device_part:
            out.add_(made.to(out.device))
        else:
            out.copy_(made)


def mixtures(decoder: Decoder, operators: Operators) -> dict[int, Mixture]:
    """Return `layer -> its experts`, of the layers that have some."""
    config, layers = decoder.config.experts, enumerate(decoder.layers)
    if config is None:
        return {}
    return {
        index: Mixture(layer.mlp, config, operators)
        for index, layer in layers
        if isinstance(layer.mlp, Experts)
    }


def _clamped(config: ExpertsConfig) -> tuple[float, float] | None:
    return None if config.clamped is None else (config.clamped.alpha, config.clamped.limit)


def _multiply(weights: Experts, count: int, config: ExpertsConfig, operators: Operators) -> Multiply:
    gate, up, down = weights.gate, weights.up, weights.down
    if isinstance(gate, PackedMatrix) and isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
        matrices = gate.native, up.native, down.native
        packed = native.packed_experts(count, *matrices, _clamped(config))

        def by_native(x: Tensor, ids: Tensor, shares: Tensor, room: ExpertScratch, out: Tensor) -> None:
            native.multiply_experts(packed, x, ids, shares, room.gate_up, room.gated, room.products, out)

        return by_native
    of_each = StackedExperts(
        count, stacked(gate, count), stacked(up, count), stacked(down, count), config.clamped
    )
    return lambda *arguments: operators.multiply_experts(of_each, *arguments)
