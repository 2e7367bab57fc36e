"""Kernels for the attention of prompt chunks, and the choice of a kernel for a device."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.models.attention import AttentionSpec

PIECE_SCORES = 32 << 20  # most scores in memory at a time, for kernels that materialize scores
BOTTOM_RIGHT = 2  # mask type of the memory-efficient kernel: the last query sees the last key


class PrefillKernel(StrEnum):
    """A kernel for prefill attention."""

    NATIVE = "native"  # our CPU kernel: a row has the same bits in any chunk, and as a decode.
    FLASH = "flash"  # one launch for all chunks of a group.
    EFFICIENT = "efficient"  # memory-efficient, one launch per chunk.
    SDPA = "sdpa"  # torch's choice, with a mask.
    MATH = "math"  # matmuls and a softmax, head by head: works on every device.


# kernel -> the next lower fallback level
BELOW = {
    PrefillKernel.FLASH: "memory-efficient",
    PrefillKernel.EFFICIENT: "math",
    PrefillKernel.SDPA: "math",
}


def choose_kernel(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    windowed: bool,
    level: str = "flash",
) -> PrefillKernel:
    """Return the best kernel; a CPU has the same kernel at all levels.

    SDPA's own choice is not good enough. With a mask, and with grouped queries below compute capability 8.0,
    it falls back to a kernel that writes all scores to memory.

    Args:
        capability: The GPU's compute capability; None: a CPU.
        windowed: True if a sliding window hides part of the context.
        level: The highest fallback level to use.
    """
    if capability is None:
        return PrefillKernel.NATIVE
    if level == "math":
        return PrefillKernel.MATH
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    if level == "flash" and capability >= (8, 0) and is_16_bit and head_dim % 8 == 0 and head_dim <= 256:
        return PrefillKernel.FLASH
    return PrefillKernel.SDPA if windowed else PrefillKernel.EFFICIENT


@lru_cache
def kernel_on(
    device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, level: str = "flash"
) -> PrefillKernel:
    """Choose a kernel for a device and the installed torch; arguments as in `choose_kernel`."""
    if device.type == "cpu":
        return choose_kernel(None, dtype, head_dim, windowed, level)
    capability = torch.cuda.get_device_capability(device)
    kernel = choose_kernel(capability, dtype, head_dim, windowed, level)
    if kernel is PrefillKernel.FLASH and not torch.backends.cuda.is_flash_attention_available():
        fallbacks.limit("prompt_attention", BELOW[kernel], "this torch was built without FlashAttention")
        return kernel_on(device, dtype, head_dim, windowed, BELOW[kernel])
    try:
        check_operator(kernel)
    except RuntimeError as error:
        fallbacks.limit("prompt_attention", BELOW[kernel], str(error))
        return kernel_on(device, dtype, head_dim, windowed, BELOW[kernel])
    return kernel


def check_operator(kernel: PrefillKernel) -> None:
    """Check that torch has a kernel's operator with the needed arguments.

    Raises:
        RuntimeError: The operator or an argument is missing.
    """
    needed = {
        PrefillKernel.FLASH: ("_flash_attention_forward", {"window_size_left", "window_size_right", "scale"}),
        PrefillKernel.EFFICIENT: ("_efficient_attention_forward", {"custom_mask_type", "scale"}),
    }
    if kernel not in needed:
        return
    name, arguments = needed[kernel]
    operator = getattr(torch.ops.aten, name, None)
    known = set() if operator is None else {argument.name for argument in operator.default._schema.arguments}
    if not arguments <= known:
        raise RuntimeError(f"torch {torch.__version__} has no usable {name}: install a version from 2.11 on")


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    max_queries: int,
    max_context: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Return the output [queries, heads, head_dim] and log(sum(exp(scores))) [heads, queries]."""
    # The operator behind torch.nn.attention.varlen. That module takes a second to import, and its argument
    # for grouped queries is required from 2.12 on but missing before.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        ends[0],
        ends[1],
        max_queries,
        max_context,
        0.0,  # dropout
        spec.window is None,  # causal; with a window, window_size_right does the same
        False,  # return no mask
        scale=spec.scale,
        window_size_left=-1 if spec.window is None else spec.window - 1,
        window_size_right=0,
    )
    return out, lse


def efficient(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output [queries, heads, head_dim] and, for sinks, log(sum(exp(scores))) [queries, heads]."""
    # The operator behind SDPA. Only a mask makes SDPA itself align the last query with the last key.
    queries, keys, values = by_kv_head(q, k, v)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        None,  # bias
        None,
        None,
        None,
        None,
        0.0,  # dropout
        BOTTOM_RIGHT,
        spec.sinks is not None,
        scale=spec.scale,
    )
    # lse is [kv_heads, group, queries], with queries padded to a multiple of 32.
    return out.transpose(0, 1).flatten(1, 2), lse[:, :, : len(q)].permute(2, 0, 1).flatten(1, 2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add one more token with a value of zero to an attention's output.

    Args:
        out: [queries, heads, head_dim], without the token.
        lse: [queries, heads]: log(sum(exp(scores))), without the token.
        sinks: [heads]: the token's score.
    """
    return out * torch.sigmoid(lse.float() - sinks.float()).unsqueeze(-1).to(out.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend causally from the last `len(q)` tokens of a context.

    Args:
        q: [queries, heads, head_dim]
        k: [context, kv_heads, head_dim]
        v: [context, kv_heads, head_dim]
    """
    scale, window = spec.scale, spec.window
    if spec.sinks is not None:
        return by_products(q, k, v, spec)
    is_whole = len(q) == len(k) and (window is None or window >= len(k))
    if is_whole:
        return sdpa(q, k, v, scale, None, is_causal=True)
    parts = []
    for piece in _pieces(len(q), len(k), PIECE_SCORES // q.shape[1], window):
        mask = piece.mask(window, q.device)
        parts.append(sdpa(q[piece.queries], k[piece.keys], v[piece.keys], scale, mask, is_causal=False))
    return torch.cat(parts)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attend to all keys, to those of a mask [queries, keys], or causally."""
    heads = by_kv_head(q, k, v)
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=is_causal, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend with torch's matmuls in fp32; arguments as in `causal_attention`."""
    scale, window, sinks, softcap = spec
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].float(), v[:, head].float()
        for piece in _pieces(len(q), len(k), PIECE_SCORES // group, window):
            queries = q[piece.queries, heads].float().transpose(0, 1)  # [group, queries, head_dim]
            scores = (queries @ keys[piece.keys].t()).mul_(scale)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores.masked_fill_(piece.mask(window, q.device).logical_not_(), -torch.inf)
            if sinks is not None:
                sink = sinks[heads].float().view(group, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = torch.softmax(scores, dim=-1)[:, :, : len(keys[piece.keys])]
            out[piece.queries, heads] = (weights @ values[piece.keys]).transpose(0, 1).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of queries, and the keys visible to at least one query."""

    queries: slice
    keys: slice
    first_position: int  # position of the first query in the context

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """Return a mask of the visible keys, [queries, keys]."""
        count = self.queries.stop - self.queries.start
        positions = torch.arange(self.first_position, self.first_position + count, device=device).unsqueeze(1)
        past = torch.arange(self.keys.start, self.keys.stop, device=device)
        mask = past <= positions
        return mask if window is None else mask & (past > positions - window)


def _pieces(num_queries: int, num_keys: int, most: int, window: int | None) -> Iterator[_Piece]:
    """Divide queries into pieces with at most `most` scores per head, or a single query."""
    before = num_keys - num_queries
    rows = max(most // num_keys, 1)
    for start in range(0, num_queries, rows):
        end = min(start + rows, num_queries)
        first = 0 if window is None else max(before + start + 1 - window, 0)
        yield _Piece(slice(start, end), slice(first, before + end), before + start)


def by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k and v as [kv_heads, group, tokens, head_dim]; K and V heads are repeated without a copy.

    The memory-efficient kernel has no grouped queries. With `enable_gqa`, SDPA below compute capability 8.0
    or in float32 falls back to a kernel that writes all scores to memory.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    queries = torch.unflatten(q, 1, (kv_heads, group)).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return queries, keys, values
