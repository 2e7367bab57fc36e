"""Gated SiLU in one pass over a tensor of gates and ups."""

import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
TILE = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute `models.operators.silu_mul`."""
    tokens, intermediate = out.shape
    assert gate_up.is_contiguous()
    assert out.is_contiguous()
    _silu_mul[tokens, triton.cdiv(intermediate, TILE)](
        gate_up, out, INTERMEDIATE=intermediate, TILE=TILE, num_warps=4, enable_fp_fusion=True
    )


@triton.jit
def _silu_mul(gate_up, out, INTERMEDIATE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = dims < INTERMEDIATE
    gates = gate_up + token * 2 * INTERMEDIATE + dims
    dtype = out.dtype.element_ty
    gate = tl.load(gates, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(gates + INTERMEDIATE, mask=in_row, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp2(-gate * LOG2_E))
    tl.store(out + token * INTERMEDIATE + dims, (silu.to(dtype).to(tl.float32) * up).to(dtype), mask=in_row)
