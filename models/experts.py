"""Mixtures of experts: which of them a token takes, and what they make of it.

On a CPU with packed weights that is one native call, for which rows are grouped by expert. Elsewhere
operators of torch do it without reading back which experts were chosen, so that CUDA graphs can hold it.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from neo_desktop import native
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.plain import Plain
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.split import Split

ROWS_AT_ONCE = 1024  # enough that most experts have many; the room that they need is bounded


class Choice(NamedTuple):
    """Which experts rows are given to, [rows, k] int32, and what their results are worth, fp32.

    Where some of a layer's experts lie in host memory, both sides have numbers of their own. What is none of
    theirs is expert 0 of the device, which is worth nothing then, and -1 of the host.
    """

    ids: Tensor
    weights: Tensor
    host_ids: Tensor
    host_weights: Tensor

    @classmethod
    def empty(cls, rows: int, per_token: int, device: torch.device) -> "Choice":
        """Return room for so many rows, with any content."""
        dtypes = (torch.int32, torch.float32) * 2
        return cls(*(torch.empty(rows, per_token, dtype=dtype, device=device) for dtype in dtypes))

    def rows(self, rows: slice) -> "Choice":
        """Return views of some rows."""
        return Choice(*(each[rows] for each in self))


class ExpertScratch(NamedTuple):
    """Memory for what experts make of some rows: `pairs` of rows and their experts, at most."""

    logits: Tensor  # [rows, experts]
    choice: "Choice"  # of all rows
    gate_up: Tensor  # [pairs, 2 * intermediate]
    gated: Tensor  # [pairs, intermediate]
    products: Tensor  # [pairs, hidden]

    per_token: int

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> "ExpertScratch | None":
        """Return room for so many rows, with any content; None for a model without experts."""
        experts = config.experts
        if experts is None:
            return None
        pairs, of_each = min(rows, ROWS_AT_ONCE) * experts.per_token, experts.intermediate_size

        def room(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        return cls(
            room(rows, experts.count),
            Choice.empty(rows, experts.per_token, device),
            room(pairs, 2 * of_each),
            room(pairs, of_each),
            room(pairs, config.hidden_size),
            experts.per_token,
        )

    def in_host_memory(self) -> "ExpertScratch":
        """Return the same room there."""
        choice = Choice(*(torch.empty_like(each, device="cpu") for each in self.choice))
        tensors = (self.logits, self.gate_up, self.gated, self.products)
        logits, *of_pairs = (torch.empty_like(each, device="cpu") for each in tensors)
        return ExpertScratch(logits, choice, of_pairs[0], of_pairs[1], of_pairs[2], self.per_token)

    def first(self, rows: int) -> "ExpertScratch":
        """Return views for the first rows."""
        pairs = min(rows, ROWS_AT_ONCE) * self.per_token
        gate_up, gated, products = (each[:pairs] for each in (self.gate_up, self.gated, self.products))
        choice = self.choice.rows(slice(rows))
        return ExpertScratch(self.logits[:rows], choice, gate_up, gated, products, self.per_token)


class Products(Protocol):
    """What the experts of a layer compute."""

    def multiply(self, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put the weighted sum of what each row's experts make of it into its row of `out`.

        Args:
            x: [n, hidden], n at most `ROWS_AT_ONCE`.
            ids: [n, k] int32: which experts.
            weights: [n, k] float32: of their results.
            room: of n rows.
            out: [n, hidden], not x.
        """


class Mixture:
    """A layer's experts, and the choice among them.

    Some of them may lie in host memory, where the CPU computes what they make.
    """

    def __init__(self, weights: Experts, config: ExpertsConfig) -> None:
        self._router, self._config = weights.router, config
        self._num_resident = config.count
        self.on_host: native.PackedExperts | None = None
        self._on_device: Products | None = None
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
            config = replace(config, count=resident)
        self._on_device = _products(weights, config)

    @property
    def has_device_part(self) -> bool:
        """Whether the device has some of the experts."""
        return self._on_device is not None

    def route(self, x: Tensor, room: ExpertScratch) -> None:
        """Choose experts for x `[n, hidden]`."""
        ids, weights = choose(self._router.multiply(x, room.logits), self._config)
        choice, resident = room.choice, self._num_resident
        if self.on_host is None:
            choice.ids.copy_(ids)
            choice.weights.copy_(weights)
            return
        is_here = ids < resident
        choice.ids.copy_(torch.where(is_here, ids, 0))
        choice.weights.copy_(torch.where(is_here, weights, 0))
        choice.host_ids.copy_(torch.where(is_here, -1, ids - resident))
        choice.host_weights.copy_(weights)

    def multiply_on_device(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put what the device's experts make of x into `out` `[n, hidden]`, which is not x."""
        assert self._on_device is not None
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ids, weights, *_ = room.choice.rows(rows)
            self._on_device.multiply(x[rows], ids, weights, room.first(len(x[rows])), out[rows])

    def multiply_on_host(self, x: Tensor, choice: Choice, room: ExpertScratch, out: Tensor) -> None:
        """Put what the others make of x into `out`; all lies in host memory."""
        assert self.on_host is not None
        for first in range(0, len(x), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            *_, ids, weights = choice.rows(rows)
            of_rows = room.first(len(x[rows]))
            scratch = of_rows.gate_up, of_rows.gated, of_rows.products
            native.multiply_experts(self.on_host, x[rows], ids, weights, *scratch, out[rows])

    def apply(self, x: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """Put what the network makes of x `[n, hidden]` into `out` `[n, hidden]`, which is not x."""
        self.route(x, room)
        if self.has_device_part:
            self.multiply_on_device(x, room, out)
        if self.on_host is None:
            return
        on_host, choice = x.cpu(), Choice(*(each.cpu() for each in room.choice))
        made = torch.empty_like(on_host)
        scratch = room if x.device.type == "cpu" else room.in_host_memory()
        self.multiply_on_host(on_host, choice, scratch, made)
        if self.has_device_part:
            out.add_(made.to(out.device))
        else:
            out.copy_(made)


def mixtures(decoder: Decoder) -> dict[int, Mixture]:
    """Return `layer -> its experts`, of the layers that have some."""
    config, layers = decoder.config.experts, enumerate(decoder.layers)
    if config is None:
        return {}
    return {index: Mixture(layer.mlp, config) for index, layer in layers if isinstance(layer.mlp, Experts)}


def choose(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, int32, and the weights of their results, float32; both `[n, k]`.

    Args:
        logits: [n, experts], of the router.
        config: of the experts.
    """
    scores = logits.float()
    if config.normalises:  # a softmax over the chosen ones alone is the same
        scores, ids = scores.topk(config.per_token)
        return ids.int(), scores.softmax(-1)
    weights, ids = scores.softmax(-1).topk(config.per_token)
    return ids.int(), weights


def _clamped(config: ExpertsConfig) -> tuple[float, float] | None:
    return None if config.clamped is None else (config.clamped.alpha, config.clamped.limit)


def clamped_mul(gate: Tensor, up: Tensor, how: ClampedGate) -> Tensor:
    """Return what a `ClampedGate` makes of gates and ups; rounded once."""
    gates, ups = gate.float().clamp(max=how.limit), up.float().clamp(-how.limit, how.limit)
    return ((ups + 1) * gates * torch.sigmoid(how.alpha * gates)).to(gate.dtype)


def _products(weights: Experts, config: ExpertsConfig) -> Products:
    gate, up, down = weights.gate, weights.up, weights.down
    if isinstance(gate, PackedMatrix) and isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
        matrices = gate.native, up.native, down.native
        return _Native(native.packed_experts(config.count, *matrices, _clamped(config)))
    return _InTorch(weights, config)


class _Native:
    def __init__(self, experts: native.PackedExperts) -> None:
        self._experts = experts

    def multiply(self, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """See `Products`."""
        native.multiply_experts(self._experts, x, ids, weights, room.gate_up, room.gated, room.products, out)


class _InTorch:
    """For any form and device. Few rows meet their experts, of more all meet all."""

    def __init__(self, weights: Experts, config: ExpertsConfig) -> None:
        self._weights, self._count, self._clamped = weights, config.count, config.clamped

    def multiply(self, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor) -> None:
        """See `Products`."""
        each = self._weights
        if ids.numel() < self._count // 2:
            for row in range(len(x)):
                total = torch.zeros_like(x[row], dtype=torch.float32)
                for slot in range(ids.shape[1]):
                    made = self._network(each, ids[row, slot : slot + 1], x[row : row + 1])
                    total += made[0] * weights[row, slot]
                out[row].copy_(total)
            return
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(self._count):
            is_chosen = ids == expert
            share = torch.where(is_chosen, weights, 0).sum(1, keepdim=True)
            made = self._network(each, expert, x)
            # What an expert makes of others' rows may be infinite.
            total += torch.where(is_chosen.any(1, keepdim=True), made * share, 0)
        out.copy_(total)

    def _network(self, each: Experts, expert: int | Tensor, x: Tensor) -> Tensor:
        gate, up = (linear(x, *self._of(matrix, expert)) for matrix in (each.gate, each.up))
        gated = silu(gate) * up if self._clamped is None else clamped_mul(gate, up, self._clamped)
        return linear(gated, *self._of(each.down, expert))

    def _of(self, matrix: Linear, expert: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return an expert's weight and bias; its number may lie on the device, [1] int32."""
        weight = matrix.weight if isinstance(matrix, Plain) else matrix.dense()
        parts = [weight, matrix.bias]
        found = [None if part is None else self._at(part, expert) for part in parts]
        assert found[0] is not None
        return found[0], found[1]

    def _at(self, stacked: Tensor, expert: int | Tensor) -> Tensor:
        of_each = stacked.view(self._count, -1, *stacked.shape[1:])
        return of_each[expert] if isinstance(expert, int) else of_each.index_select(0, expert)[0]
