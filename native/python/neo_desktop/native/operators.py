"""A layer's operators between its matmuls."""

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import default_isa, view_of


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Add `x` to `residual` in place, and write the RMSNorm of the sum, times `weight`, to `out`.

    Computes in fp32; rounds the sum, the normalised sum, and its product with the weights.

    Args:
        x: [n, hidden], fp32, fp16 or bf16; may be strided in n. out may be x.
        residual: as x.
        weight: [hidden], contiguous.
        eps: of the RMSNorm.
        out: as x.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    _native.add_rms_norm(
        view_of("x", x),
        view_of("residual", residual),
        view_of("weight", weight),
        eps,
        view_of("out", out),
        num_threads,
        isa or default_isa(),
    )


def silu_mul(
    gate_up: torch.Tensor, out: torch.Tensor, num_threads: int = 0, *, isa: str | None = None
) -> None:
    """Write `silu(gate) * up` to `out`; rounds silu(gate), and its product with up.

    Args:
        gate_up: [n, 2 * m], fp32, fp16 or bf16, gates first; may be strided in n.
        out: [n, m] in that dtype; may be strided in n.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    _native.silu_mul(view_of("gate_up", gate_up), view_of("out", out), num_threads, isa or default_isa())


def choose_tokens(logits: torch.Tensor, out: torch.Tensor, num_threads: int = 0) -> None:
    """Write the index of every row's largest number, the first among equals, to `out`.

    Args:
        logits: [n, m], fp32, fp16 or bf16; may be strided in n.
        out: [n] int64; -1 where a number is NaN or the largest is infinite.
        num_threads: 0 means `default_num_threads()`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    _native.choose_tokens(view_of("logits", logits), view_of("tokens", out), num_threads)


def choose_experts(
    logits: torch.Tensor,
    normalises: bool,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    is_sigmoid: bool = False,
    epsilon: float = 0.0,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    num_threads: int = 0,
) -> None:
    """Choose each row's k best experts, best first, the first among equals; NaN is the best.

    Args:
        logits: [n, experts], fp32, fp16 or bf16; may be strided in n.
        normalises: shares are divided by the sum of the chosen ones; of sigmoids, plus `epsilon`.
        ids: [n, k] int32, an output; may be strided in n.
        weights: [n, k] float32, an output: the chosen experts' shares; may be strided in n.
        is_sigmoid: a share is the logit's sigmoid, not the softmax over all experts.
        bias: [experts] float32, added to sigmoids for the choice only.
        factors: [experts] float32, of the shares.
        num_threads: 0 means `default_num_threads()`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    tensors = view_of("ids", ids), view_of("weights", weights)
    kind = is_sigmoid, normalises, epsilon
    _native.choose_experts(
        view_of("logits", logits),
        kind,
        None if bias is None else view_of("bias", bias),
        None if factors is None else view_of("factors", factors),
        *tensors,
        num_threads,
    )


def rope(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Normalise (if asked) and rotate heads in place.

    Rounds the normalised head, its product with the weights, and the rotated head.

    Args:
        heads: [n, heads, head_dim], fp32, fp16 or bf16; may be strided in n.
        cos: [n, head_dim] fp32.
        sin: [n, head_dim] fp32; its first half is negated: `x * cos + (x with its halves swapped) * sin`.
        norm: [heads, head_dim] in heads' dtype, contiguous: weights of an RMSNorm per head, before the
        rotation.
        eps: of the RMSNorm.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    _native.rope(
        view_of("heads", heads),
        view_of("cos", cos),
        view_of("sin", sin),
        None if norm is None else view_of("norm", norm),
        eps,
        num_threads,
        isa or default_isa(),
    )
