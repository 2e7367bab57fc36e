"""Linear attention with a state of fixed size per request, and short convolutions."""

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import default_isa, view_of


def scan_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    spans: torch.Tensor,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    is_delta: bool,
    isa: str | None = None,
) -> None:
    """Pass tokens through the states of heads: Gated DeltaNet, or Mamba-2 without the delta rule.

    With S the state of a head, for each token: S = exp(decay) * S; d = beta * (v - S^T k), or beta * v;
    S = S + k d^T; out = S^T q. Computes in fp32. (arXiv:2412.06464, arXiv:2405.21060.)

    Args:
        q: [tokens, key_heads, key_dim], fp32, fp16 or bf16, scaled and normalised already; may be strided.
        k: as q. Neighbouring heads share a key.
        v: [tokens, heads, value_dim] of that dtype; heads is a multiple of key_heads.
        decay: [tokens, heads] fp32, at most 0.
        beta: [tokens, heads] fp32.
        state: [slots, heads, key_dim, value_dim] fp32, contiguous.
        spans: [n, 4] int32, {first, end, source, target}: a request's tokens `first .. end - 1`, the slot of
            its state before them (-1: zeros) and after them (-1: dropped). Targets differ from each other,
            and from the sources of other spans. Tokens outside the spans are ignored.
        out: as v; may be v.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.scan_state(
        view_of("q", q),
        view_of("k", k),
        view_of("v", v),
        view_of("decay", decay),
        view_of("beta", beta),
        is_delta,
        view_of("state", state),
        view_of("spans", spans),
        view_of("out", out),
        num_threads,
        isa or default_isa(),
    )


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    spans: torch.Tensor,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    has_silu: bool,
    isa: str | None = None,
) -> None:
    """Convolve each channel with its last inputs, causally; add the bias; apply silu if asked.

    Args:
        x: [tokens, channels], fp32, fp16 or bf16; may be strided in tokens.
        weight: [width, channels] fp32, oldest input first; width is 2 to 8.
        bias: [channels] fp32.
        state: [slots, width - 1, channels] fp32, contiguous: a request's last inputs, oldest first.
        spans: as in `scan_state`.
        out: as x; may be x.
        num_threads: 0 means `default_num_threads()`.
        has_silu: apply silu to the sum.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.short_convolution(
        view_of("x", x),
        view_of("weight", weight),
        None if bias is None else view_of("bias", bias),
        has_silu,
        view_of("state", state),
        view_of("spans", spans),
        view_of("out", out),
        num_threads,
        isa or default_isa(),
    )
