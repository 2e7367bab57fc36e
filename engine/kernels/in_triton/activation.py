"""Gated activations in one pass over a tensor of gates and ups."""

import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.models.experts_config import ClampedGate, Gating

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
TILE = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute `models.operators.silu_mul`."""
    gated(gate_up, "silu", out)


def gated(gate_up: Tensor, how: Gating, out: Tensor) -> None:
    """Compute `models.expert_operators.gated` of gates and ups, `[n, 2 * intermediate]`."""
    tokens, intermediate = out.shape
    assert all(each.is_contiguous() for each in (gate_up, out))
    assert isinstance(how, ClampedGate) or how in {"silu", "gelu", "relu"}
    clamped = how if isinstance(how, ClampedGate) else ClampedGate()
    _gated[tokens, triton.cdiv(intermediate, TILE)](
        gate_up,
        out,
        clamped.alpha,
        clamped.limit,
        INTERMEDIATE=intermediate,
        HOW=how if isinstance(how, str) else "clamped",
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _gated(gate_up, out, alpha, limit, INTERMEDIATE: tl.constexpr, HOW: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = dims < INTERMEDIATE
    gates = gate_up + token * 2 * INTERMEDIATE + dims
    dtype = out.dtype.element_ty
    gate = tl.load(gates, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(gates + INTERMEDIATE, mask=in_row, other=0.0).to(tl.float32)
    if HOW == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        value = gate / (1.0 + tl.exp2(-alpha * gate * LOG2_E))
    elif HOW == "relu":
        value = tl.maximum(gate, 0.0)
    else:
        inner = gate
        if HOW == "gelu":  # (1 + tanh(z)) / 2 is the logistic function of 2 * z
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = (gate / (1.0 + tl.exp2(-inner * LOG2_E))).to(dtype).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + dims, (value * up).to(dtype), mask=in_row)
