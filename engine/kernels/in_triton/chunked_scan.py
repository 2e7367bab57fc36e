"""Scans of prompts: chunks of tokens by matmuls, for `recurrent.scan_state`.

S is the state before a chunk. The product of the decays of tokens j + 1 to i is p[i, j], and p[i, -1] begins
with the chunk's first token. A token updates the state by

    D[i] = beta[i] * (v[i] - p[i, -1] * S^T k[i] - sum over j < i of p[i, j] * (k[i] . k[j]) * D[j])

With T, the inverse of a unit lower triangular matrix times beta, D = T (V - p[:, -1] * K S). This is the WY
form of Gated DeltaNet (arXiv:2412.06464). Without the delta rule D = beta * V, as in Mamba-2's SSD
(arXiv:2405.21060).

The results are p[:, -1] * Q S + A D, where A[i, j] = p[i, j] * (q[i] . k[j]) for j <= i. The next state is
p[last, -1] * S + K^T (p[last, :] * D).

`_within_chunks` computes A and T for every chunk at once. `_across_chunks` takes a head's state from chunk to
chunk. Products are those of float32 without tensor cores: these need three products of TF32 for its digits,
which spilled registers for 0.7 times as many instructions, and GeForce cards multiply TF32 no faster.
Logarithms of decays are only added: differences of long sums would lose digits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.models.recurrent import Spans

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEVELS = 4
CHUNK = 2**LEVELS  # tokens
KEYS = 32  # rows of a head's state per warp
VALUES = 16  # its columns per program
MOST_KEYS = 256  # of wider heads, the state exceeds the registers


def scan_chunks(*tensors: Tensor, spans: Spans, out: Tensor, is_delta: bool) -> None:
    """Compute `models.recurrent.scan_state` for at most `MOST_KEYS` keys; the tensors are q to state."""
    q, k, v, decay, beta, _ = tensors
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    weights = torch.empty(1 + is_delta, len(v), heads, CHUNK, dtype=torch.float32, device=v.device)
    key_pad = max(triton.next_power_of_2(key_dim), 16)
    blocks = triton.cdiv(key_pad, KEYS)
    constants = {
        "IS_DELTA": is_delta,
        "HEADS": heads,
        "SHARED": heads // key_heads,
        "KEY_DIM": key_dim,
        "KEYS": min(key_pad, KEYS),
        "CHUNK": CHUNK,
        "enable_fp_fusion": True,
    }
    num_chunks = triton.cdiv(spans.longest, CHUNK)
    _within_chunks[len(spans.table), num_chunks, heads](
        q, k, decay, beta, spans.table, weights[0], weights[-1], LEVELS=LEVELS, **constants, num_warps=1
    )
    _across_chunks[len(spans.table), heads, triton.cdiv(value_dim, VALUES)](
        *tensors,
        spans.table,
        weights[0],
        weights[-1],
        out,
        VALUE_DIM=value_dim,
        BLOCKS=blocks,
        VALUES=VALUES,
        num_warps=blocks,
        num_stages=1,
        **constants,
    )


@triton.jit
def _within_chunks(
    q,
    k,
    decay,
    beta,
    spans,
    weights,  # A, [tokens, HEADS, CHUNK]; rows follow the chunk's tokens
    solution,  # T, the same
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK = 2**LEVELS
):
    span = spans + tl.program_id(0) * 4
    begin = tl.load(span).to(tl.int64) + tl.program_id(1) * CHUNK
    left = tl.load(span + 1) - begin
    if left <= 0:
        return
    head = tl.program_id(2)
    token = tl.arange(0, CHUNK)
    is_token = token < left
    row = (begin + token) * HEADS + head
    key_row = ((begin + token) * (HEADS // SHARED) + head // SHARED) * KEY_DIM
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    likeness = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, KEY_DIM, KEYS):
        keys = first + tl.arange(0, KEYS)
        own = key_row[:, None] + keys[None, :]
        is_own = is_token[:, None] & (keys < KEY_DIM)[None, :]
        key = tl.load(k + own, mask=is_own, other=0.0).to(tl.float32)
        query = tl.load(q + own, mask=is_own, other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(key), scores, input_precision="ieee")
        if IS_DELTA:
            likeness = tl.dot(key, tl.trans(key), likeness, input_precision="ieee")
    i, j = token[:, None], token[None, :]
    each = tl.load(decay + row, mask=is_token, other=0.0)[:, None]
    passed = tl.exp2(tl.cumsum(tl.where(i > j, each, 0.0), axis=0) * LOG2_E)
    into = row[:, None] * CHUNK + j
    tl.store(weights + into, tl.where(i >= j, passed * scores, 0.0), mask=is_token[:, None])
    if IS_DELTA:
        factor = tl.load(beta + row, mask=is_token, other=0.0)
        system = tl.where(i > j, passed * likeness, 0.0) * factor[:, None]
        # Blocks on the diagonal are inverted: single tokens, then pairs, and so on. Two blocks become one:
        # [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
        inverse = tl.where(i == j, 1.0, 0.0)
        for level in range(LEVELS):
            is_below = ((i >> level) == (j >> level) + 1) & ((j >> level) % 2 == 0)
            below = tl.dot(tl.where(is_below, system, 0.0), inverse, input_precision="ieee")
            inverse -= tl.dot(inverse, below, input_precision="ieee")
        tl.store(solution + into, inverse * factor[None, :], mask=is_token[:, None])


@triton.jit
def _across_chunks(
    q,
    k,
    v,
    decay,
    beta,
    state,
    spans,
    weights,
    solution,
    out,
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCKS: tl.constexpr,  # of keys
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    span = spans + tl.program_id(0) * 4
    begin, end = tl.load(span).to(tl.int64), tl.load(span + 1).to(tl.int64)
    source, target = tl.load(span + 2).to(tl.int64), tl.load(span + 3).to(tl.int64)
    head = tl.program_id(1)
    keys = (tl.arange(0, BLOCKS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])[:, None, :]
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    # A warp has a block of keys, so the state [BLOCKS, VALUES, KEYS] never leaves its registers.
    own = (head * KEY_DIM + keys) * VALUE_DIM + values[None, :, None]
    is_own = is_key & is_value[None, :, None]
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    s = tl.load(state + source * size + own, mask=is_own & (source >= 0), other=0.0)
    dtype = out.dtype.element_ty
    token = tl.arange(0, CHUNK)
    for first in range(begin, end, CHUNK):
        rows = first + token
        is_token = rows < end
        row = rows * HEADS + head
        key_row = (rows * (HEADS // SHARED) + head // SHARED) * KEY_DIM
        key_own = key_row[None, :, None] + keys
        is_key_own = is_token[None, :, None] & is_key
        value_own = row[:, None] * VALUE_DIM + values[None, :]
        is_value_own = is_token[:, None] & is_value[None, :]
        square = row[:, None] * CHUNK + token[None, :]
        key = tl.load(k + key_own, mask=is_key_own, other=0.0).to(tl.float32)
        query = tl.load(q + key_own, mask=is_key_own, other=0.0).to(tl.float32)
        update = tl.load(v + value_own, mask=is_value_own, other=0.0).to(tl.float32)
        each = tl.load(decay + row, mask=is_token, other=0.0)
        before = tl.exp2(tl.cumsum(each, axis=0) * LOG2_E)[:, None]
        # Decays of the tokens after each token.
        is_followed = (token < CHUNK - 1) & (rows + 1 < end)
        later = tl.load(decay + row + HEADS, mask=is_followed, other=0.0)
        after = tl.exp2(tl.cumsum(later, axis=0, reverse=True) * LOG2_E)[:, None]
        old = tl.trans(s, 0, 2, 1)
        if IS_DELTA:
            update -= before * tl.sum(tl.dot(key, old, input_precision="ieee"), axis=0)
            solve = tl.load(solution + square, mask=is_token[:, None], other=0.0)
            update = tl.dot(solve, update, input_precision="ieee")
        else:
            update *= tl.load(beta + row, mask=is_token, other=0.0)[:, None]
        result = before * tl.sum(tl.dot(query, old, input_precision="ieee"), axis=0)
        among = tl.load(weights + square, mask=is_token[:, None], other=0.0)
        result = tl.dot(among, update, result, input_precision="ieee")
        tl.store(out + value_own, result.to(dtype), mask=is_value_own)
        s *= tl.exp2(tl.sum(each) * LOG2_E)
        kept = tl.broadcast_to(tl.trans(update * after)[None], [BLOCKS, VALUES, CHUNK])
        s = tl.dot(kept, key, s, input_precision="ieee")
    tl.store(state + target * size + own, s, mask=is_own & (target >= 0))
