"""Mixtures of experts: the choice, products with the matrices of those that were chosen, and their sums.

A row and one of its experts are a pair, `row * k + slot`. Pairs of one expert are put together in blocks,
`[blocks, COUNT]`; what is left of a block is -1, and a block that begins so has none. A program takes a block
and some rows of its expert's matrix: it reads from memory which expert that is, so that nobody has to wait
for what was chosen, and graphs hold it. Numbers of blocks follow from shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.engine.kernels.in_triton.activation import silu_mul
from neo_desktop.engine.kernels.in_triton.paged_decode import has_tensor_cores
from neo_desktop.engine.kernels.in_triton.quantised import PLAIN_ROWS, multiply_pairs
from neo_desktop.models.expert_operators import ExpertScratch, clamped_mul
from neo_desktop.models.linear.grouped import MOST_ROWS
from neo_desktop.models.linear.stacked import Stacked, StackedExperts

FEW_PAIRS = 1024  # are put into blocks by one kernel, more by sorting
BLOCK = 16  # pairs of a block, for products of floats
LARGE_BLOCK = 64  # likewise, where experts have about as many
ROWS = 32  # of a matrix of floats, for a program
LARGE_ROWS = 64
STEP = 64  # columns of a step
SUM_COLUMNS = 1024


def choose_experts(logits: Tensor, normalises: bool, ids: Tensor, weights: Tensor) -> None:
    """See `models.expert_operators.choose_experts`."""
    experts, k = logits.shape[1], ids.shape[1]
    assert logits.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
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
    """See `models.expert_operators.multiply_experts`."""
    pairs, k, intermediate = ids.numel(), ids.shape[1], experts.gate.rows
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert out.stride(1) == 1
    gate_up, gated, products = (each[:pairs] for each in (room.gate_up, room.gated, room.products))
    blocks: dict[int, Tensor] = {}

    def multiply(given: Tensor, per_row: int, matrix: Stacked, into: Tensor) -> None:
        count = pairs_of_block(given, pairs, len(x), experts.count, matrix)
        if count not in blocks:
            blocks[count] = in_blocks(ids, len(x), experts.count, count)
        if isinstance(matrix.weight, Tensor):
            multiply_floats(given, per_row, matrix, matrix.weight, ids, blocks[count], into)
        else:
            multiply_pairs(given, per_row, matrix.weight, matrix.bias, matrix.rows, ids, blocks[count], into)

    multiply(x, k, experts.gate, gate_up[:, :intermediate])
    multiply(x, k, experts.up, gate_up[:, intermediate:])
    if experts.clamped is None:
        silu_mul(gate_up, gated)
    else:
        gates, ups = gate_up.chunk(2, dim=1)
        gated.copy_(clamped_mul(gates, ups, experts.clamped))
    multiply(gated, 1, experts.down, products)
    add_up(products, ids, weights, out, adds=adds)


def add_up(products: Tensor, ids: Tensor, weights: Tensor, out: Tensor, *, adds: bool) -> None:
    """Put sums of `products` `[n * k, hidden]` times weights `[n, k]` into `out` `[n, hidden]`, or add them.

    Products of no expert, whose id `[n, k]` is -1, are nothing, whatever is there.
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
    """Return how many pairs of an expert are multiplied at once."""
    uses_cores = x.dtype is not torch.float32 and has_tensor_cores(x.device)
    if isinstance(matrix.weight, Tensor):
        return LARGE_BLOCK if uses_cores and pairs >= LARGE_BLOCK * experts // 2 else BLOCK
    if rows == 1:  # whose experts are all different
        return 1
    return MOST_ROWS if uses_cores and pairs > experts else PLAIN_ROWS


def in_blocks(ids: Tensor, rows: int, experts: int, count: int) -> Tensor:
    """Return pairs of one expert each, `[blocks, count]` int32; pairs of none are left out."""
    pairs = ids.numel()
    if rows == 1 and count == 1:
        pair = torch.arange(pairs, dtype=torch.int32, device=ids.device)
        return torch.where(ids.flatten() >= 0, pair, -1)[:, None]
    if pairs <= FEW_PAIRS:
        blocks = torch.empty(pairs, count, dtype=torch.int32, device=ids.device)
        size = triton.next_power_of_2(pairs)
        of_program = max(2048 // size, 1)
        _find_blocks[(triton.cdiv(pairs, of_program),)](
            ids, blocks, pairs, COUNT=count, SIZE=size, OWN=of_program, num_warps=4
        )
        return blocks
    of_pairs, order = ids.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    starts = torch.searchsorted(of_pairs, edges)
    num_blocks = (starts.diff() + count - 1) // count
    ends = num_blocks.cumsum(0)
    block = torch.arange(min(pairs, experts) + pairs // count, device=ids.device)
    expert = torch.searchsorted(ends, block, right=True).clamp_(max=experts - 1)
    first = starts[expert] + (block - (ends - num_blocks)[expert]) * count
    place = first[:, None] + torch.arange(count, device=ids.device)
    is_pair = (block < ends[-1])[:, None] & (place < starts[expert + 1][:, None])
    return torch.where(is_pair, order[place.clamp_(0, pairs - 1)], -1).int()


def multiply_floats(
    x: Tensor, per_row: int, matrix: Stacked, weight: Tensor, ids: Tensor, blocks: Tensor, out: Tensor
) -> None:
    """Put products with experts' matrices of floats into `out`; see `quantised.multiply_pairs`."""
    assert weight.is_contiguous()
    assert weight.shape[1] % STEP == 0
    assert x.stride(1) == out.stride(1) == 1
    is_large = blocks.shape[1] > BLOCK
    rows = LARGE_ROWS if is_large else ROWS
    assert matrix.rows % rows == 0
    _multiply_blocks[len(blocks), matrix.rows // rows](
        x,
        weight,
        out if matrix.bias is None else matrix.bias,
        ids,
        blocks,
        out,
        matrix.rows,
        weight.shape[1],
        x.stride(0),
        out.stride(0),
        per_row,
        HAS_BIAS=matrix.bias is not None,
        COUNT=blocks.shape[1],
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
        at = tl.minimum(tl.argmax(left, axis=0), experts - 1)  # whatever it is where nothing is a number
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
    """Of the pairs of an expert, every COUNT-th begins a block, which is where the pair is."""
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
