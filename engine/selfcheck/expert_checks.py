"""Checks of MoE layers on the GPU, at each fallback level, against float64."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.dispatch import choose_experts, multiply_experts
from neo_desktop.engine.selfcheck.kv_checks import error_of
from neo_desktop.engine.selfcheck.rig import BOUNDS, Rig, require
from neo_desktop.models.expert_operators import Choice, ExpertScratch
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.grouped import Grouped
from neo_desktop.models.linear.stacked import Stacked, StackedExperts

EXPERTS, PER_TOKEN = 6, 2
INTERMEDIATE = 64
MOST_HIDDEN = 1024  # limit for checks: larger sizes use the same code
ROWS = (1, 3, 40)
ROUNDED_BOUND = 0.02  # relative error of products whose inputs are rounded to 8 bits
KINDS = (None, "Q8_0", "Q4_1")  # weight formats; None: floats


def check_experts(rig: Rig) -> Figures:
    """Check the choice of experts, and their outputs for few and many rows."""
    hidden = min(-(-rig.config.hidden_size // 64) * 64, MOST_HIDDEN)
    errors = []
    for kind in KINDS:
        experts, exact = _experts(rig, kind, hidden)
        for rows in ROWS:
            logits, x = (torch.randn(rows, width).to(rig.dtype) for width in (EXPERTS, hidden))
            ids, weights = _chosen(rig, logits)
            room = _room(rig, rows, hidden)
            out = torch.empty(rows, hidden, dtype=rig.dtype, device=rig.device)
            there = ids.to(rig.device), weights.to(rig.device)
            work = partial(multiply_experts, experts, x.to(rig.device), *there, room, out)
            work()
            error = error_of(out.cpu(), _expected(exact, x, ids, weights))
            if kind is not None and fallbacks.level("quantised") == "integers":
                require(error, ROUNDED_BOUND, {})
            else:
                errors.append(error)
    return rig.judge(errors, work, room.gate_up.nbytes + room.gated.nbytes + room.products.nbytes)


def _experts(rig: Rig, kind: str | None, hidden: int) -> tuple[StackedExperts, list[Tensor]]:
    """Return experts, and their gate, up and down weights in float64."""
    stacked, exact = [], []
    for rows, columns in ((INTERMEDIATE, hidden), (INTERMEDIATE, hidden), (hidden, INTERMEDIATE)):
        weight: Tensor | Grouped
        if kind is None:
            floats = (torch.randn(EXPERTS * rows, columns) / columns**0.5).to(rig.dtype)
            weight = floats.to(rig.device)
        else:
            weight = Grouped(kind, EXPERTS * rows, columns, rig.device)
            weight.fill(torch.Generator(rig.device).manual_seed(0))
            weight.scales.mul_(0.02)
            floats = torch.empty(EXPERTS * rows, columns)
            grouped.dequantise(weight.to(torch.device("cpu")), 0, floats)
        stacked.append(Stacked(weight, None, rows))
        exact.append(floats.double().view(EXPERTS, rows, columns))
    gate, up, down = stacked
    return StackedExperts(EXPERTS, gate, up, down), exact


def _chosen(rig: Rig, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose experts on the device; raise CheckError unless they are the best."""
    ids = torch.full((len(logits), PER_TOKEN), -1, dtype=torch.int32, device=rig.device)
    weights = torch.empty(len(logits), PER_TOKEN, device=rig.device)
    choose_experts(logits.to(rig.device), True, ids, weights)
    chosen, best = ids.cpu().long(), logits.double().topk(PER_TOKEN)
    if chosen.min() < 0 or chosen.max() >= EXPERTS:
        raise CheckError("experts were chosen that do not exist")
    scores = logits.double().gather(1, chosen)
    if not torch.equal(scores, best.values):
        raise CheckError("other experts than the best were chosen")
    require(error_of(weights.cpu(), scores.softmax(-1)), BOUNDS[torch.float32], {})
    return ids.cpu(), weights.cpu()


def _room(rig: Rig, rows: int, hidden: int) -> ExpertScratch:
    def room(columns: int) -> Tensor:
        return torch.empty(rows * PER_TOKEN, columns, dtype=rig.dtype, device=rig.device)

    logits, choice = room(EXPERTS), Choice.empty(rows, PER_TOKEN, rig.device)
    return ExpertScratch(logits, choice, room(2 * INTERMEDIATE), room(INTERMEDIATE), room(hidden), PER_TOKEN)


def _expected(exact: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gates, ups, downs = (matrix[ids.long()] for matrix in exact)  # [n, k, rows, columns]
    one = x.double()[:, None, :, None]
    made = downs @ (silu(gates @ one) * (ups @ one))
    return (made[..., 0] * weights.double()[:, :, None]).sum(1)
