"""MoE layers: routing, matmuls with the chosen experts, and weighted sums of their outputs.

A pair is a row with one of its experts, `row * k + slot`. Pairs of the same expert are grouped in blocks,
`[blocks, COUNT]`, padded with -1; a block that starts with -1 is empty. A program multiplies a block by some
rows of its expert's matrix. It reads the expert's ID from device memory, so the host need not wait for the
routing, and CUDA graphs can capture the launch. The number of blocks follows from shapes alone.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.engine.kernels.in_triton.activation import gated
from neo_desktop.engine.kernels.in_triton.paged_decode import has_tensor_cores
from neo_desktop.engine.kernels.in_triton.quantised import (
    COUNTS,
    PLAIN_ROWS,
    inputs_of,
    multiplies_integers,
    multiply_pairs,
)
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.linear.grouped import MOST_ROWS
from neo_desktop.models.linear.stacked import Stacked, StackedExperts

FEW_PAIRS = 1024  # up to this number, one kernel groups pairs in blocks; more pairs are sorted.
BLOCK = 16  # pairs per block, for float matrices.
LARGE_BLOCK = 64  # pairs per block if experts have at least half as many pairs on average.
ROWS = 32  # rows of a float matrix per program.
LARGE_ROWS = 64  # rows per program for large blocks.
STEP = 64  # columns per step.
SUM_COLUMNS = 1024


def choose_experts(logits: Tensor, normalises: bool, ids: Tensor, weights: Tensor) -> None:
    """Compute `models.expert_operators.choose_experts`."""
    experts, k = logits.shape[1], ids.shape[1]
    assert logits.stride(1) == 1
    assert all(each.is_contiguous() for each in (ids, weights))
    _choose[(len(logits),)](
        logits,
        ids,
        weights,
        experts,
        logits.stride(0),
        K=k,
        SLOTS=triton.next_power_of_2(k),
        SIZE=triton.next_power_of_2(experts),
        NORMALISES=normalises,
        num_warps=1,
    )


def multiply_experts(
    experts: StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    room: ExpertScratch,
    out: Tensor,
    adds: bool = False,
) -> None:
    """Compute `models.expert_operators.multiply_experts`."""
    pairs, k, intermediate = ids.numel(), ids.shape[1], experts.gate.rows
    assert all(each.is_contiguous() for each in (ids, weights))
    assert out.stride(1) == 1
    gate_up, inner, products = (each[:pairs] for each in (room.gate_up, room.gated, room.products))
    blocks: dict[int, Tensor] = {}
    inputs = cache(inputs_of)  # gates and ups share theirs

    def multiply(given: Tensor, per_row: int, matrix: Stacked, into: Tensor) -> None:
        count = pairs_of_block(given, pairs, len(x), experts.count, matrix)
        if count not in blocks:
            blocks[count] = in_blocks(ids, len(x), experts.count, count)
        if isinstance(matrix.weight, Tensor):
            multiply_floats(given, per_row, matrix, matrix.weight, ids, blocks[count], into)
        else:
            rows = inputs(given)
            multiply_pairs(rows, per_row, matrix.weight, matrix.bias, matrix.rows, ids, blocks[count], into)

    multiply(x, k, experts.gate, gate_up[:, :intermediate])
    multiply(x, k, experts.up, gate_up[:, intermediate:])
    gated(gate_up, experts.gating, inner)
    multiply(inner, 1, experts.down, products)
    add_up(products, ids, weights, out, adds=adds)


def add_up(products: Tensor, ids: Tensor, weights: Tensor, out: Tensor, *, adds: bool) -> None:
    """Write the weighted sums over a row's experts to `out`, or add them to it.

    Args:
        products: [n * k, hidden]; content of pairs without expert has no influence.
        ids: [n, k]: the pairs' experts; -1: no expert.
        weights: [n, k]
        out: [n, hidden]
        adds: True: add to `out`. False: overwrite.
    """
    rows, columns = out.shape
    _add_up[rows, triton.cdiv(columns, SUM_COLUMNS)](
        products,
        ids,
        weights,
        out,
        columns,
        out.stride(0),
        ADDS=adds,
        K=weights.shape[1],
        COLUMNS=SUM_COLUMNS,
        num_warps=4,
    )


def pairs_of_block(x: Tensor, pairs: int, rows: int, experts: int, matrix: Stacked) -> int:
    """Return the number of an expert's pairs per block."""
    uses_cores = x.dtype is not torch.float32 and has_tensor_cores(x.device)
    if isinstance(matrix.weight, Tensor):
        return LARGE_BLOCK if uses_cores and pairs >= LARGE_BLOCK * experts // 2 else BLOCK
    if rows == 1:  # all experts of a row are different
        return 1
    if multiplies_integers():  # at least twice the mean, as experts differ
        return next((count for count in COUNTS[2:] if 2 * pairs <= count * experts), COUNTS[-1])
    return MOST_ROWS if uses_cores and pairs > experts else PLAIN_ROWS


def in_blocks(ids: Tensor, rows: int, experts: int, count: int) -> Tensor:
    """Group pairs of the same expert in blocks, `[blocks, count]` int32; leave out pairs without expert."""
    pairs = ids.numel()
    if rows == 1 and count == 1:
        pair = torch.arange(pairs, dtype=torch.int32, device=ids.device)
        return torch.where(ids.flatten() >= 0, pair, -1)[:, None]
    if pairs <= FEW_PAIRS:
        blocks = torch.empty(pairs, count, dtype=torch.int32, device=ids.device)
        size = triton.next_power_of_2(pairs)
        own = max(2048 // size, 1)  # pairs per program
        _find_blocks[(triton.cdiv(pairs, own),)](
            ids, blocks, pairs, COUNT=count, SIZE=size, OWN=own, num_warps=4
        )
        return blocks
    sorted_ids, order = ids.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    starts = torch.searchsorted(sorted_ids, edges)
    num_blocks = (starts.diff() + count - 1) // count
    ends = num_blocks.cumsum(0)
    block = torch.arange(min(pairs, experts) + pairs // count, device=ids.device)
    expert = torch.searchsorted(ends, block, right=True).clamp_(max=experts - 1)
    first = starts[expert] + (block - (ends - num_blocks)[expert]) * count
    place = first[:, None] + torch.arange(count, device=ids.device)
    is_pair = (block < ends[-1])[:, None] & (place < starts[expert + 1][:, None])
    return torch.where(is_pair, order[place.clamp_(0, pairs - 1)], -1).int()


def multiply_floats(
    x: Tensor, per_row: int, matrix: Stacked, weight: Tensor, ids: Tensor, pairs: Tensor, out: Tensor
) -> None:
    """Multiply by experts' float matrices into `out`; arguments as in `quantised.multiply_pairs`."""
    assert weight.is_contiguous()
    assert weight.shape[1] % STEP == 0
    assert x.stride(1) == out.stride(1) == 1
    is_large = pairs.shape[1] > BLOCK
    rows = LARGE_ROWS if is_large else ROWS
    assert matrix.rows % rows == 0
    _multiply_blocks[len(pairs), matrix.rows // rows](
        x,
        weight,
        out if matrix.bias is None else matrix.bias,
        ids,
        pairs,
        out,
        matrix.rows,
        weight.shape[1],
        x.stride(0),
        out.stride(0),
        per_row,
        HAS_BIAS=matrix.bias is not None,
        COUNT=pairs.shape[1],
        ROWS=rows,
        STEP=STEP,
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=("experts", "stride"))
def _choose(
    logits,
    ids,
    weights,
    experts,
    stride,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, SIZE)
    slot = tl.arange(0, SLOTS)
    given = expert < experts
    scores = tl.load(logits + row * stride + expert, mask=given, other=-float("inf")).to(tl.float32)
    largest = tl.max(scores, axis=0)
    total = tl.sum(tl.where(given, tl.exp(scores - largest), 0.0), axis=0)
    best = tl.full([SLOTS], -float("inf"), tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    left = scores
    for i in tl.static_range(K):
        at = tl.minimum(tl.argmax(left, axis=0), experts - 1)  # stays in range if no score is a number
        best = tl.where(slot == i, tl.sum(tl.where(expert == at, scores, 0.0), axis=0), best)
        chosen = tl.where(slot == i, at, chosen)
        left = tl.where(expert == at, -float("inf"), left)
    shares = tl.where(slot < K, tl.exp(best - largest), 0.0)
    if NORMALISES:
        total = tl.sum(shares, axis=0)
    tl.store(ids + row * K + slot, chosen, mask=slot < K)
    tl.store(weights + row * K + slot, shares / total, mask=slot < K)


@triton.jit(do_not_specialize=("pairs",))
def _find_blocks(ids, blocks, pairs, COUNT: tl.constexpr, SIZE: tl.constexpr, OWN: tl.constexpr):
    """Start a block at every COUNT-th pair of an expert, in that pair's row of `blocks`."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    other = tl.arange(0, SIZE)
    own_expert = tl.load(ids + own, mask=own < pairs, other=-1)
    other_expert = tl.load(ids + other, mask=other < pairs, other=-2)
    alike = own_expert[:, None] == other_expert[None, :]
    so_far = tl.cumsum(alike.to(tl.int32), axis=1)
    before = tl.sum((alike & (other[None, :] < own[:, None])).to(tl.int32), axis=1)
    for i in tl.static_range(COUNT):
        is_it = alike & (so_far == (before + i + 1)[:, None])
        pair = tl.max(tl.where(is_it, other[None, :], -1), axis=1)
        pair = tl.where((before % COUNT == 0) & (own_expert >= 0), pair, -1)
        tl.store(blocks + own * COUNT + i, pair, mask=own < pairs)


@triton.jit(do_not_specialize=("per_row",))
def _multiply_blocks(
    x,
    weight,
    bias,
    ids,
    blocks,
    out,
    rows,
    columns,
    x_stride,
    out_stride,
    per_row,
    HAS_BIAS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    own = blocks + tl.program_id(0) * COUNT
    leader = tl.load(own)
    if leader < 0:
        return
    pair = tl.load(own + tl.arange(0, COUNT))
    is_pair = pair >= 0
    source = (tl.maximum(pair, 0) // per_row).to(tl.int64)
    first = tl.load(ids + leader).to(tl.int64) * rows + tl.program_id(1) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, STEP)
    inputs = x + source[:, None] * x_stride + column[None, :]
    numbers = weight + (first + row)[None, :] * columns + column[:, None]
    sums = tl.zeros([COUNT, ROWS], tl.float32)
    for start in range(0, columns, STEP):
        some = tl.load(inputs + start, mask=is_pair[:, None], other=0.0)
        sums = tl.dot(some, tl.load(numbers + start), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + first + row).to(tl.float32)[None, :]
    into = out + pair.to(tl.int64)[:, None] * out_stride + tl.program_id(1) * ROWS + row[None, :]
    tl.store(into, sums.to(out.dtype.element_ty), mask=is_pair[:, None])


@triton.jit
def _add_up(
    products,
    ids,
    weights,
    out,
    columns,
    stride,
    ADDS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(K):
        given = tl.where(tl.load(ids + row * K + i) >= 0, columns, 0)
        made = tl.load(products + (row * K + i) * columns + column, mask=column < given, other=0.0)
        sums += made.to(tl.float32) * tl.load(weights + row * K + i)
    into = out + row * stride + column
    if ADDS:
        sums += tl.load(into, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(into, sums.to(out.dtype.element_ty), mask=column < columns)
