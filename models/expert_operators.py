"""What lies between the router of a mixture of experts and its result, by torch's operators, for any device.

Nothing is read back, so that CUDA graphs can hold it. `engine.kernels.dispatch` offers the same as kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import ClampedGate
from neo_desktop.models.linear.stacked import StackedExperts

ROWS_AT_ONCE = 1024  # enough that most experts have many; the room that they need is bounded


class Choice(NamedTuple):
    """Which experts rows are given to, [rows, k] int32, and what their results are worth, fp32."""

    ids: Tensor
    weights: Tensor
    host_ids: Tensor  # see `MoE.find_host_ids`

    @classmethod
    def empty(cls, rows: int, per_token: int, device: torch.device) -> "Choice":
        """Return room for so many rows, with any content."""
        dtypes = (torch.int32, torch.float32, torch.int32)
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

    def first(self, rows: int) -> "ExpertScratch":
        """Return views for the first rows."""
        pairs = min(rows, ROWS_AT_ONCE) * self.per_token
        gate_up, gated, products = (each[:pairs] for each in (self.gate_up, self.gated, self.products))
        choice = self.choice.rows(slice(rows))
        return ExpertScratch(self.logits[:rows], choice, gate_up, gated, products, self.per_token)


def ids_among(ids: Tensor, first: int, count: int) -> Tensor:
    """Return the numbers that experts have among some of them that follow each other; -1: they are others."""
    own = ids - first
    return torch.where((own >= 0) & (own < count), own, -1)


def choose_experts(logits: Tensor, normalises: bool, ids: Tensor, weights: Tensor) -> None:
    """Choose the experts of each row.

    Args:
        logits: [n, experts], of the router.
        normalises: whether a row's weights sum to 1; else they are their share of all experts'.
        ids: [n, k] int32, filled with which they are, the best first.
        weights: [n, k] float32, filled with what their results are multiplied with.
    """
    scores = logits.float()
    if normalises:  # a softmax over the chosen ones alone is the same
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
    """Put the weighted sum of what each row's experts make of it into its row of `out`.

    Few rows meet their experts; of more all meet all, which takes longer.

    Args:
        experts: of the layer.
        x: [n, hidden], n at most `ROWS_AT_ONCE`.
        ids: [n, k] int32: which experts; -1: none.
        weights: [n, k] float32: of their results.
        room: of n rows.
        out: [n, hidden], not x.
        adds: whether the sums are added to what is there.
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
            # What an expert makes of others' rows may be infinite.
            total += torch.where(is_chosen.any(1, keepdim=True), made * share, 0)
    if adds:
        out.add_(total)
    else:
        out.copy_(total)


def _network(experts: StackedExperts, expert: int | Tensor, x: Tensor) -> Tensor:
    gate, up = (linear(x, *each.of(expert, x.dtype)) for each in (experts.gate, experts.up))
    gated = silu(gate) * up if experts.clamped is None else clamped_mul(gate, up, experts.clamped)
    return linear(gated, *experts.down.of(expert, x.dtype))


def clamped_mul(gate: Tensor, up: Tensor, how: ClampedGate) -> Tensor:
    """Return what a `ClampedGate` makes of gates and ups; rounded once."""
    gates, ups = gate.float().clamp(max=how.limit), up.float().clamp(-how.limit, how.limit)
    return ((ups + 1) * gates * torch.sigmoid(how.alpha * gates)).to(gate.dtype)
