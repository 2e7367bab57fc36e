"""Decode attention over a paged KV cache, split over the context (flash decoding).

A program attends from the query heads of one KV head, at most 16 (8 in fp32), to one part of a request's
context. K and V are read once, or by neighbouring programs at the same time. A second kernel merges the parts
in fp32, unless a context has only one part. The split loses no precision:

    part      out_p = softmax(scores_p) @ V_p          lse_p = log2(sum(exp(scores_p)))
    request   out = sum(w_p*out_p) / sum(w_p)          w_p = 2**(lse_p - max(lse))

A head's sink joins the last sum of weights. With a softcap, a score s becomes softcap * tanh(s / softcap) in
a separate variant of the kernel.

The number of parts, and with it the grid, follows from shapes alone (`num_splits`), so that one CUDA graph
serves all batches of these shapes. The device computes the bounds of the parts from each request's length.
Programs without tokens end at once, and their part of the workspace is never read.

`tl.dot` becomes tensor-core instructions from compute capability 8.0 on. `plain_decode` serves 7.5.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from neo_desktop.engine.kernels import occupancy
from neo_desktop.engine.kernels.in_triton.plain_decode import (
    LOG2_E_IN_KERNEL,
    MAX_GROUP,
    NUM_WARPS,
    attend_plain,
    capped,
    cut,
    plain_shape,
)

LOG2_E = 1.4426950408889634
EVERYTHING = 2**31 - 1  # a window larger than any context

MOST_HEAD_BYTES = 32  # query heads per program times bytes per element; more need too many registers
PARTS_AT_ONCE = 16  # parts per step of the merge kernel


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Compute `in_torch.paged_decode`, without reads beyond a context."""
    requests, heads, head_dim = q.shape
    window = EVERYTHING if window is None else window
    tensors = q, k_cache, v_cache, block_tables, context_lens, out, partial_out, partial_lse
    tile, _ = _launch(tensors, scale, window, sinks, softcap)
    splits = partial_lse.shape[2]
    if splits == 1:
        return
    _merge[heads, requests](
        partial_out,
        partial_lse,
        context_lens,
        out,
        out if sinks is None else sinks,
        window,
        splits,
        out.stride(0),
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        TILE=tile,
        PARTS=PARTS_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=True,
    )


def programs_per_sm(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int | None:
    """Return the number of programs that fit on a multiprocessor at once; see `dispatch.programs_per_sm`.

    None: the compiled kernel does not report its needs, or the GPU's limits are unknown.
    """
    heads, head_dim = q.shape[1:]
    key = (q.device, q.dtype, heads, head_dim, k_cache.shape[1:], k_cache.stride())
    if key not in _programs_per_sm:
        nothing = torch.zeros(1, dtype=torch.int32, device=q.device)
        row = torch.empty_like(q[:1])
        partials = (torch.empty(0, heads, 1, *size, device=q.device) for size in ((head_dim,), ()))
        _, compiled = _launch((row, k_cache, v_cache, nothing.view(1, 1), nothing, row, *partials), window=1)
        major, minor = torch.cuda.get_device_capability(q.device)
        _programs_per_sm[key] = programs_of(compiled, 10 * major + minor)
    return _programs_per_sm[key]


_programs_per_sm: dict[Hashable, int | None] = {}


def programs_of(compiled: Any, capability: int) -> int | None:
    """Return the number of a launched kernel's programs that fit on a multiprocessor; None: unknown."""
    registers, metadata = getattr(compiled, "n_regs", None), getattr(compiled, "metadata", None)
    shared, num_warps = getattr(metadata, "shared", None), getattr(metadata, "num_warps", None)
    if registers is None or shared is None or num_warps is None:  # the interpreter, or another Triton
        return None
    return occupancy.programs_per_sm(capability, registers, shared, num_warps)


def _launch(
    tensors: tuple[Tensor, ...],
    scale: float = 1.0,
    window: int = EVERYTHING,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[int, Any]:
    """Attend to every part; return the kernel's tile in tokens, and the compiled kernel."""
    q, k_cache, v_cache, block_tables, _, out, _, partial_lse = tensors
    requests, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == q.stride(2) == out.stride(2) == 1
    assert q.stride(1) == out.stride(1) == head_dim
    splits = partial_lse.shape[2]
    group = heads // kv_heads
    head_pad = triton.next_power_of_2(head_dim)
    strides = q.stride(0), out.stride(0), *k_cache.stride()[:3]
    numbers = scale * LOG2_E, window, splits, *strides, block_tables.shape[1]
    arguments = *tensors, out if sinks is None else sinks, *numbers
    constants: dict[str, Any] = {
        "HAS_SINKS": sinks is not None,
        "SOFTCAP": 0.0 if softcap is None else softcap * LOG2_E,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_SIZE": block_size,
        "enable_fp_fusion": True,
    }
    if group <= MAX_GROUP and not has_tensor_cores(q.device):
        shape = plain_shape(group, head_pad, q.element_size())
        tile = shape["STEPS"] * shape["LANES"]
        constants |= {**shape, "TILE": tile, "num_warps": NUM_WARPS, "num_stages": 1}
        return tile, attend_plain[kv_heads, splits, requests](*arguments, **constants)
    # More tokens at once spill registers on 7.5; tensor cores take no fewer than 16.
    tile = max(16, min(32, 4096 // head_pad))
    most_heads = MOST_HEAD_BYTES // q.element_size()
    turns = triton.cdiv(group, most_heads)
    constants |= {"TURNS": turns, "HEADS": min(triton.next_power_of_2(group), most_heads), "TILE": tile}
    # From 8.0 on: two tiles of K and V are in flight, and the tables of two more; of wide heads half.
    constants |= {"num_warps": 4, "num_stages": 5 if head_pad <= 256 else 3}
    return tile, _attend[kv_heads * turns, splits, requests](*arguments, **constants)


def has_tensor_cores(device: torch.device) -> bool:
    """Return True if `tl.dot` uses tensor cores and loads can run in the background."""
    if device.type == "cuda":
        return _capability(device) >= (8, 0)
    # Triton's interpreter, or compilation without a launch for the current target.
    return bool(triton.knobs.runtime.interpret) or int(driver.active.get_current_target().arch) >= 80


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# Do not compile variants for arguments that differ between batches or layers, their alignment included.
@triton.jit(do_not_specialize=("block_tables", "context_lens", "max_blocks", "window", "num_splits", "sinks"))
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    out,
    partial_out,
    partial_lse,
    sinks,
    scale,
    window,
    num_splits,
    q_stride,
    out_stride,
    block_stride,
    token_stride,
    head_stride,
    max_blocks,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # softcap of scores in units of log2; 0: none
    GROUP: tl.constexpr,
    TURNS: tl.constexpr,  # programs that share the query heads of a KV head
    HEADS: tl.constexpr,  # query heads per program
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(0) // TURNS  # neighbours in the grid read the same or adjacent memory
    split = tl.program_id(1)
    request = tl.program_id(2)
    context_len = tl.load(context_lens + request)
    first, split_tokens = cut(context_len, window, num_splits, TILE)
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, context_len)
    dims = tl.arange(0, HEAD_PAD)
    group = tl.program_id(0) % TURNS * HEADS + tl.arange(0, HEADS)
    heads = kv_head * GROUP + group
    in_heads = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_rows = out + request * out_stride + (heads * HEAD_DIM)[:, None] + dims[None, :]
    if begin >= end:
        if num_splits == 1:  # padding: this program has to write the zeros
            tl.store(out_rows, tl.zeros([HEADS, HEAD_PAD], out.dtype.element_ty), mask=in_heads)
        return

    q_rows = q + request * q_stride + heads * HEAD_DIM
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=in_heads, other=0.0)
    table = block_tables + request * max_blocks

    # Running softmax per query head: the largest score, the sum of weights, the weighted sum of V.
    top = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, HEAD_PAD], tl.float32)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        in_context = positions < end
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
        rows = blocks * block_stride + positions % BLOCK_SIZE * token_stride + kv_head * head_stride
        elements = rows[:, None] + dims[None, :]
        # The cache has arbitrary content beyond the context, and 0 * nan is nan.
        in_tile = in_context[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_cache + elements, mask=in_tile, other=0.0)
        values = tl.load(v_cache + elements, mask=in_tile, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = capped(scores, SOFTCAP)
        scores = tl.where(in_context[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        summed = summed * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    if HAS_SINKS and num_splits == 1:
        sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0)
        total += tl.exp2(sink * LOG2_E_IN_KERNEL - top)
    result = summed / total[:, None]
    if num_splits == 1:
        tl.store(out_rows, result.to(out.dtype.element_ty), mask=in_heads)
    else:
        parts = (request * (tl.num_programs(0) // TURNS) * GROUP + heads) * num_splits + split
        tl.store(partial_lse + parts, top + tl.log2(total), mask=group < GROUP)
        tl.store(partial_out + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=in_heads)


@triton.jit(do_not_specialize=("context_lens", "window", "num_splits", "sinks"))
def _merge(
    partial_out,
    partial_lse,
    context_lens,
    out,
    sinks,
    window,
    num_splits,
    out_stride,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1)
    context_len = tl.load(context_lens + request)
    first, split_tokens = cut(context_len, window, num_splits, TILE)
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD_DIM
    out_row = out + request * out_stride + head * HEAD_DIM + dims
    if context_len == 0:  # padding: no part was written
        tl.store(out_row, tl.zeros([HEAD_PAD], out.dtype.element_ty), mask=in_head)
        return

    num_written = tl.cdiv(context_len - first, split_tokens)
    first_part = (request * tl.num_programs(0) + head) * num_splits
    # Running softmax: the largest lse so far, the sum of weights, the weighted sum of outputs.
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([HEAD_PAD], tl.float32)
    for begin in range(0, num_written, PARTS):
        splits = begin + tl.arange(0, PARTS)
        written = splits < num_written
        parts = first_part + splits
        lse = tl.load(partial_lse + parts, mask=written, other=-float("inf"))
        rows = partial_out + parts[:, None] * HEAD_DIM + dims[None, :]
        outs = tl.load(rows, mask=written[:, None] & in_head[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=0)
        merged = merged * decay + tl.sum(weights[:, None] * outs, axis=0)
        top = new_top
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E_IN_KERNEL - top)
    tl.store(out_row, (merged / total).to(out.dtype.element_ty), mask=in_head)
