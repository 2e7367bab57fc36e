"""The operators of a mixture of experts after its router, in torch, for any device.

They never synchronise with the host, so CUDA graphs can capture them. `engine.kernels.dispatch` offers the
same operators as Triton kernels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig, Gating
from neo_desktop.models.linear.stacked import StackedExperts

ROWS_AT_ONCE = 1024  # most experts get many rows, and scratch memory stays bounded


class Choice(NamedTuple):
    """Routing of rows: expert ids [rows, k] int32, and routing weights [rows, k] fp32."""

    ids: Tensor
    weights: Tensor
    host_ids: Tensor  # see `MoE.find_host_ids`

    @classmethod
    def empty(cls, rows: int, per_token: int, device: torch.device) -> "Choice":
        dtypes = (torch.int32, torch.float32, torch.int32)
        return cls(*(torch.empty(rows, per_token, dtype=dtype, device=device) for dtype in dtypes))

    def rows(self, rows: slice) -> "Choice":
        return Choice(*(tensor[rows] for tensor in self))


class ExpertScratch(NamedTuple):
    """Scratch memory of a mixture of experts; `pairs` counts (row, expert) pairs of one pass, at most."""

    logits: Tensor  # [rows, experts]
    choice: "Choice"  # for all rows
    gate_up: Tensor  # [pairs, 2 * intermediate]
    gated: Tensor  # [pairs, intermediate]
    products: Tensor  # [pairs, hidden]

    per_token: int

    @classmethod
    def empty(
        cls, rows: int, experts: ExpertsConfig, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> "ExpertScratch":
        per_token, intermediate = experts.per_token, experts.intermediate_size
        pairs = min(rows, ROWS_AT_ONCE) * per_token

        def room(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        choice = Choice.empty(rows, per_token, device)
        rooms = room(pairs, 2 * intermediate), room(pairs, intermediate), room(pairs, hidden)
        return cls(room(rows, experts.count), choice, *rooms, per_token)

    def first(self, rows: int) -> "ExpertScratch":
        pairs = min(rows, ROWS_AT_ONCE) * self.per_token
        gate_up, gated, products = (tensor[:pairs] for tensor in (self.gate_up, self.gated, self.products))
        choice = self.choice.rows(slice(rows))
        return ExpertScratch(self.logits[:rows], choice, gate_up, gated, products, self.per_token)


def passes(
    x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch, out: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, ExpertScratch, Tensor]]:
    """Yield the same arguments for at most `ROWS_AT_ONCE` rows at a time."""
    for first in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        yield x[rows], ids[rows], weights[rows], room.first(len(x[rows])), out[rows]


def ids_among(ids: Tensor, first: int, count: int) -> Tensor:
    """Return the expert ids relative to `first`; -1 for experts outside the `count` that follow."""
    own = ids - first
    return torch.where((own >= 0) & (own < count), own, -1)


def choose_experts(logits: Tensor, normalises: bool, ids: Tensor, weights: Tensor) -> None:
    """Select the top-k experts per row.

    Args:
        logits: [n, experts], from the router.
        normalises: a row's weights sum to 1; else they are probabilities among all experts.
        ids: [n, k] int32, the output: expert ids, best first.
        weights: [n, k] float32, the output: routing weights.
    """
    scores = logits.float()
    if normalises:  # a softmax over the selected experts is the same
        best, chosen = scores.topk(ids.shape[1])
        torch.softmax(best, -1, out=weights)
    else:
        best, chosen = scores.softmax(-1).topk(ids.shape[1])
        weights.copy_(best)
    ids.copy_(chosen)


def multiply_experts(
    experts: StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    room: ExpertScratch,
    out: Tensor,
    adds: bool = False,
) -> None:
    """Apply the selected experts to the rows, and write the weighted sums of their results to `out`.

    With few rows, each row is multiplied by its own experts. With more, every expert multiplies all rows,
    which takes longer.

    Args:
        x: [n, hidden], n at most `ROWS_AT_ONCE`.
        ids: [n, k] int32, expert ids; -1: none.
        weights: [n, k] float32, routing weights.
        out: [n, hidden], must not alias x; the sums overwrite it, or are added to it.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    if ids.numel() < experts.count // 2:
        for row in range(len(x)):
            for slot in range(ids.shape[1]):
                one = ids[row, slot : slot + 1]
                made = _network(experts, one.clamp(min=0), x[row : row + 1])
                total[row] += torch.where(one >= 0, made[0] * weights[row, slot], 0)
    else:
        for expert in range(experts.count):
            is_chosen = ids == expert
            share = torch.where(is_chosen, weights, 0).sum(1, keepdim=True)
            made = _network(experts, expert, x)
            # Results for rows of other experts may be infinite; 0 * inf would be NaN.
            total += torch.where(is_chosen.any(1, keepdim=True), made * share, 0)
    if adds:
        out.add_(total)
    else:
        out.copy_(total)


def _network(experts: StackedExperts, expert: int | Tensor, x: Tensor) -> Tensor:
    gate = linear(x, *experts.gate.of(expert, x.dtype))
    up = gate if experts.up is experts.gate else linear(x, *experts.up.of(expert, x.dtype))
    return linear(gated(gate, up, experts.gating), *experts.down.of(expert, x.dtype))


def gated(gate: Tensor, up: Tensor, how: Gating) -> Tensor:
    """Apply gates to ups; a `ClampedGate` in fp32, rounded once."""
    if not isinstance(how, ClampedGate):
        if how == "relu":
            return relu(gate) * up
        return (silu(gate) if how == "silu" else gelu(gate, approximate="tanh")) * up
    gates, ups = gate.float().clamp(max=how.limit), up.float().clamp(-how.limit, how.limit)
    return ((ups + 1) * gates * torch.sigmoid(how.alpha * gates)).to(gate.dtype)
