"""Residual addition and RMSNorm in one pass."""

import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute `models.operators.add_rms_norm`."""
    tokens, hidden = x.shape
    assert all(each.is_contiguous() for each in (x, residual, out))
    pad = triton.next_power_of_2(hidden)
    _add_rms_norm[tokens,](
        x,
        residual,
        weight,
        eps,
        out,
        HIDDEN=hidden,
        PAD=pad,
        num_warps=min(max(pad // 512, 1), 16),  # 16 elements per thread, up to 512 threads
        enable_fp_fusion=True,
    )


@triton.jit
def _add_rms_norm(x, residual, weight, eps, out, HIDDEN: tl.constexpr, PAD: tl.constexpr):
    dims = tl.arange(0, PAD)
    in_row = dims < HIDDEN
    elements = tl.program_id(0).to(tl.int64) * HIDDEN + dims
    dtype = residual.dtype.element_ty
    added = tl.load(x + elements, mask=in_row, other=0.0).to(tl.float32)
    added += tl.load(residual + elements, mask=in_row, other=0.0).to(tl.float32)
    rounded = added.to(dtype)
    tl.store(residual + elements, rounded, mask=in_row)
    total = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / HIDDEN + eps)
    normed = (total * factor).to(dtype).to(tl.float32)
    scale = tl.load(weight + dims, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out + elements, (normed * scale).to(dtype), mask=in_row)
