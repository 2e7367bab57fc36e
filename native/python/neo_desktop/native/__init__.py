"""Native kernels: decode attention over a paged KV cache on the CPU.

The instruction set is chosen at run time; NEO_DESKTOP_ISA in the environment forces one of
`available_isas()`.

Threads: calls share one pool of workers, which sleep between calls; the calling thread takes part and the
GIL is released. Any number of threads may call at once. A forked child makes its own pool on first use. How
many threads a call takes by default follows the CPUs that the process may use, until somebody sets it.
Workers stay on one CPU each, unless `bind_threads(False)` lets those that begin later go where the system
puts them; `bind_threads(True)` says whether the system lets them be bound.
"""

import os
from collections.abc import Callable, Sequence

import torch

from neo_desktop.native import _native
from neo_desktop.native._native import (
    LayerState,
    PackedExperts,
    PackedLayer,
    available_isas,
    bind_threads,
    cpu_features,
    default_num_threads,
    num_threads_beside_gpu,
    num_usable_cpus,
    set_default_num_threads,
)

__all__ = [
    "DENSE_TYPES",
    "STORED_TYPES",
    "LayerState",
    "Matrix",
    "PackedExperts",
    "PackedLayer",
    "add_rms_norm",
    "advance",
    "advise_huge_pages",
    "available_isas",
    "bind_threads",
    "cpu_features",
    "default_isa",
    "default_num_threads",
    "empty_paired_keys",
    "fma_rate",
    "follow_isa",
    "interleave_numa_nodes",
    "layer_state",
    "multiply_experts",
    "num_threads_beside_gpu",
    "num_usable_cpus",
    "pack_quantised",
    "packed_bytes",
    "packed_experts",
    "packed_layer",
    "packed_linear",
    "paged_attention_decode",
    "paged_kv_read",
    "paged_kv_write",
    "read_bandwidth",
    "read_seconds",
    "rope",
    "set_default_num_threads",
    "silu_mul",
    "store_rows",
    "unpack_quantised",
]

_DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.int32: 4,
    torch.int64: 5,
}


STORED_TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
)  # fmt: skip
"""Of GGUF files, that there are kernels for: the numbers are kept, some in more bits (Q3_K in 6)."""


DENSE_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of weights that are not quantised, behind those in the order of `packed_linear`'s types."""


def _chosen_isa() -> str:
    return available_isas()[-1]


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    num_threads: int = 0,
    *,
    block_size: int | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    window: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    isa: str | None = None,
) -> torch.Tensor:
    """Attention of one new token per request over its paged context; returns `out`.

    Work is split over requests, KV heads and chunks of context, whose partial softmaxes are merged in fp32
    (Flash-Decoding). The result depends neither on the number of threads nor on the rest of the batch.

    Args:
        q: [batch, heads, head_dim], fp32, fp16 or bf16; may be strided in batch and heads.
        k_cache: [num_pages, kv_heads, page_tokens, head_dim], fp32, fp16 or bf16; may be strided in
            num_pages and kv_heads. Query head h reads KV head h // (heads // kv_heads). head_dim is a
            multiple of 8 up to 256. Faster, above all where heads are grouped: `empty_paired_keys()`,
            [num_pages, kv_heads, page_tokens, head_dim / 2, 2], which may also be int8.
        v_cache: [num_pages, kv_heads, page_tokens, head_dim] in the dtype of k_cache.
        block_tables: [batch, max_blocks] int32; token t is in slot
            block_tables[b, t // block_size] * block_size + t % block_size, and slot s is row
            s % page_tokens of page s // page_tokens. Entries outside a request's context or window are not
            read.
        context_lens: [batch] int32, tokens in the cache, the newest included; 0: there is no request, and its
            row of `out` stays as it is.
        scale: multiplies q·k, usually head_dim ** -0.5.
        out: [batch, heads, head_dim], fp32, fp16 or bf16, made in q's dtype when None; must not overlap the
            inputs.
        num_threads: 0 means `default_num_threads()`.
        block_size: tokens of an entry of block_tables; divides page_tokens, and is a multiple of 16 where
            keys are paired. None: page_tokens. Reading is fastest where the blocks of a page follow each
            other in a table.
        k: [batch, kv_heads, head_dim], fp32, fp16 or bf16: the newest tokens' keys, which the call writes
            into the cache, cast to its dtype, before it attends to them; None if they are there already.
            No two requests may have the same last slot.
        v: as k.
        window: attend to the last `window` tokens only; 0 means all.
        k_scale: [num_pages, kv_heads, page_tokens] fp32, what each row of an int8 cache is multiplied with;
            None for other dtypes.
        v_scale: as k_scale.
        sinks: [heads] fp32: the score of one more token for each head, whose value is zero; None: there is
            no such token.
        softcap: scores s become softcap * tanh(s / softcap), of tokens alone; 0: they stay as they are.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was read or written.

    Non-finite keys, values or queries make the heads that attend to them non-finite, and no others.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v of the new tokens come together, or not at all")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1 token")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    _native.paged_attention_decode(
        (
            view_of("q", q),
            view_of("out", out),
            view_of("block_tables", block_tables),
            view_of("context_lens", context_lens),
            None if k is None else view_of("k", k),
            None if v is None else view_of("v", v),
            block_size or 0,
            scale,
            softcap,
        ),
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        window,
        None if sinks is None else view_of("sinks", sinks),
        num_threads,
        isa or default_isa(),
    )
    return out


def empty_paired_keys(
    *leading: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Make a K cache in the layout that is fastest to read.

    Returns [*leading, kv_heads, page_tokens, head_dim / 2, 2]: a view of memory in which the tokens of a page
    lie side by side, two dimensions of each at a time, [*leading, kv_heads, head_dim / 2, page_tokens, 2].
    `flatten(-2)` of it, or of an indexed part of it, gives rows again.

    Raises:
        ValueError: page_tokens is not a multiple of 16.
    """
    if page_tokens % 16 != 0:
        raise ValueError(f"page_tokens is {page_tokens}; paired keys need a multiple of 16")
    return torch.empty(*leading, kv_heads, head_dim // 2, page_tokens, 2, dtype=dtype).transpose(-3, -2)


def paged_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_threads: int = 0,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    isa: str | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the cache, cast to its dtype.

    Args:
        k: [n, kv_heads, head_dim], fp32, fp16 or bf16; may be strided in n and kv_heads.
        v: as k.
        k_cache: as in `paged_attention_decode`.
        v_cache: as in `paged_attention_decode`.
        slots: [n] int64, see `paged_attention_decode`; all different (of equal ones, any may win).
        num_threads: 0 means `default_num_threads()`.
        k_scale: as in `paged_attention_decode`; written too: a row's largest element becomes 127 steps.
        v_scale: as k_scale.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.paged_kv_write(
        view_of("k", k),
        view_of("v", v),
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        view_of("slots", slots),
        num_threads,
        isa or default_isa(),
    )


def paged_kv_read(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    num_threads: int = 0,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    isa: str | None = None,
) -> None:
    """Read keys and values out of slots of the cache; the inverse of `paged_kv_write`.

    Fastest where slots follow each other.

    Args:
        k_cache: as in `paged_attention_decode`.
        v_cache: as in `paged_attention_decode`.
        slots: [n] int64; any may come several times.
        k_out: [n, kv_heads, head_dim], fp32, fp16 or bf16, to which the rows are cast; may be strided in n
            and kv_heads; must not overlap the inputs.
        v_out: as k_out.
        num_threads: 0 means `default_num_threads()`.
        k_scale: as in `paged_attention_decode`.
        v_scale: as k_scale.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.paged_kv_read(
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        view_of("slots", slots),
        view_of("k_out", k_out),
        view_of("v_out", v_out),
        num_threads,
        isa or default_isa(),
    )


def store_rows(rows: torch.Tensor, slots: torch.Tensor, into: torch.Tensor, num_threads: int = 0) -> None:
    """Put rows of several layers into their slots: `into[layer, slots[i]] = rows[layer, i]`.

    Args:
        rows: [layers, n, width], of any dtype of the native functions; may be strided in layers and n.
        slots: [n] int64, contiguous, all different (of equal ones, any may win).
        into: [layers, slots, width] of rows' dtype; may be strided likewise; must not overlap rows.
        num_threads: 0 means `default_num_threads()`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.store_rows(view_of("rows", rows), view_of("slots", slots), view_of("into", into), num_threads)


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
    """Add `x` to `residual` in place, and put the RMSNorm of the sum, times `weight`, into `out`.

    Computes in fp32; rounds the sum, the normalised sum, and its product with the weights.

    Args:
        x: [n, hidden], fp32, fp16 or bf16; may be strided in n, likewise residual and out. out may be x.
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
    """Put `silu(gate) * up` into `out`; rounds silu(gate), and its product with up.

    Args:
        gate_up: [n, 2 * m], fp32, fp16 or bf16, gates first; may be strided in n.
        out: [n, m] of that dtype; may be strided in n.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape or stride is wrong; nothing was written.
    """
    _native.silu_mul(view_of("gate_up", gate_up), view_of("out", out), num_threads, isa or default_isa())


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
        norm: [heads, head_dim] of heads' dtype, contiguous: the weights of an RMSNorm of each head, before
            the rotation; None: there is no norm.
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


def packed_linear(
    x: torch.Tensor,
    parts: Sequence[tuple[int, int, int, int]],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Put `x @ weight.T + bias` into `out`, with weights in tiles.

    For quantised weights x is rounded to 8 bits, for others sums are fp32. A row's product depends neither on
    other rows nor on threads, and for quantised weights not on the instruction set.

    Args:
        x: [n, columns], fp32, fp16 or bf16; columns is even, for quantised weights a multiple of 32, of 256
            where types share scales among so many. May be strided in n.
        parts: of the weight's rows, one after the other: type (of `STORED_TYPES`, then `DENSE_TYPES`),
            address and bytes of the packed weights, rows. All are quantised, or none is.
            native/include/neo_desktop/quantised_kernels.h and kernels.h tell how they lie.
        bias: [rows of all parts] of x's dtype.
        out: [n, rows of all parts] of x's dtype; may be strided in n; must not overlap x.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.packed_linear(
        view_of("x", x),
        parts,
        None if bias is None else view_of("bias", bias),
        view_of("out", out),
        num_threads,
        isa or default_isa(),
    )


Matrix = tuple[Sequence[tuple[int, int, int, int]], torch.Tensor | None]
"""Parts and bias, see `packed_linear`."""


def packed_layer(
    input_norm: torch.Tensor,
    qkv: Matrix,
    qk_norm: torch.Tensor | None,
    output: Matrix,
    post_attention_norm: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    eps: float,
) -> PackedLayer:
    """Return what `advance` takes for a decoder's layer; it owns none of the memory.

    Args:
        input_norm: [hidden], of the model's dtype; post_attention_norm likewise.
        qkv: the product that gives queries, keys and values.
        qk_norm: [heads of queries and keys, head_dim], or None.
        output: what follows the attention.
        post_attention_norm: see input_norm.
        gate_up: gates, then ups.
        down: of the feed-forward network.
        eps: of the norms.
    """

    return PackedLayer(
        view_of("input_norm", input_norm),
        _seen(qkv),
        None if qk_norm is None else view_of("qk_norm", qk_norm),
        _seen(output),
        view_of("post_attention_norm", post_attention_norm),
        _seen(gate_up),
        _seen(down),
        eps,
    )


def _seen(matrix: Matrix) -> tuple[Sequence[tuple[int, int, int, int]], "_View | None"]:
    parts, bias = matrix
    return parts, None if bias is None else view_of("bias", bias)


def layer_state(
    residual: torch.Tensor,
    x: torch.Tensor,
    qkv: torch.Tensor,
    rotated: torch.Tensor,
    attention: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    normed: torch.Tensor,
    gate_up: torch.Tensor,
    gated: torch.Tensor,
) -> LayerState:
    """Return what layers hand on, as `advance` takes it; it owns none of the memory.

    Args:
        residual: [n, hidden], of the model's dtype, as all but cos and sin.
        x: [n, hidden]: what is to be added to it.
        qkv: [n, all heads * head_dim]
        rotated: [n, heads of queries and keys, head_dim]: part of qkv.
        attention: [n, heads * head_dim]: its output.
        cos: [n, head_dim] fp32, see `rope`; sin likewise.
        sin: see cos.
        normed: [n, hidden], with any content, likewise the others.
        gate_up: [n, 2 * intermediate]
        gated: [n, intermediate]
    """
    tensors = (residual, x, qkv, rotated, attention, cos, sin, normed, gate_up, gated)
    return LayerState([view_of("a layer's tensor", tensor) for tensor in tensors])


def advance(
    finished: PackedLayer | None,
    begun: PackedLayer | None,
    state: LayerState,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Compute what follows the attention of layer `finished`, then what precedes that of layer `begun`.

    Threads are woken once. The numbers are those of `packed_linear`, `add_rms_norm`, `silu_mul`, `rope`.

    Args:
        finished: None: nothing.
        begun: None: nothing; else up to rotated queries and keys, with nothing stored.
        state: what layers hand on; meant for few rows.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: shapes or dtypes do not fit together; nothing was written.
    """
    _native.advance(finished, begun, state, num_threads, isa or default_isa())


def packed_experts(
    count: int, gate: Matrix, up: Matrix, down: Matrix, clamped: tuple[float, float] | None = None
) -> PackedExperts:
    """Return what `multiply_experts` takes for a layer's feed-forward networks; it owns none of the memory.

    Args:
        count: of experts.
        gate: [count * intermediate, hidden], one expert after the other; up likewise.
        up: see gate.
        down: [count * hidden, intermediate]
        clamped: alpha and limit, of (up + 1) * gate * sigmoid(alpha * gate) with gates of at most the limit
            and ups between -limit and limit; None: silu(gate) * up.

    Raises:
        ValueError: an expert's rows are no multiple of 16, or lie in two parts; or alpha or limit is not
            above 0.
    """
    return PackedExperts(count, _seen(gate), _seen(up), _seen(down), clamped)


def multiply_experts(
    experts: PackedExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gated: torch.Tensor,
    products: torch.Tensor,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Put the weighted sum of what a row's experts make of it into its row of `out`.

    Each expert's weights are read once, whatever the number of rows. Products are those of `packed_linear`,
    sums over a row's experts are fp32, in the order of its ids. A row's result depends neither on other rows
    nor on threads.

    Args:
        experts: see `packed_experts`.
        x: [n, hidden], fp32, fp16 or bf16; may be strided in n.
        ids: [n, k] int32, contiguous: which experts; -1: none.
        weights: [n, k] fp32: of their results.
        gate_up: [n * k, 2 * intermediate] of x's dtype, with any content, likewise the next two.
        gated: [n * k, intermediate]
        products: [n * k, hidden]
        out: [n, hidden] of x's dtype.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    tensors = (x, ids, weights, gate_up, gated, products, out)
    _native.multiply_experts(
        experts,
        [view_of("a tensor of experts", tensor) for tensor in tensors],
        num_threads,
        isa or default_isa(),
    )


def packed_bytes(stored_type: str, rows: int, columns: int) -> int:
    """Return the bytes that rows of one of `STORED_TYPES` take once they are packed."""
    return _native.packed_bytes(STORED_TYPES.index(stored_type), rows, columns)


def pack_quantised(stored_type: str, raw: torch.Tensor, first: int, packed: torch.Tensor) -> bool:
    """Pack rows as GGUF files have them; returns False if scales are not finite.

    Args:
        stored_type: one of `STORED_TYPES`.
        raw: [rows, bytes of a row] uint8, contiguous.
        first: where the rows come, in the whole matrix.
        packed: [packed_bytes] uint8 of the matrix.

    Raises:
        ValueError: there is no room for them, or a row has no whole number of blocks.
    """
    _check_contiguous(raw)
    _check_contiguous(packed)
    kind = STORED_TYPES.index(stored_type)
    block, nbytes = _native.stored_block(kind)
    columns = raw.shape[1] // nbytes * block
    if raw.shape[1] % nbytes or not 0 <= first <= first + len(raw):
        raise ValueError(f"rows of {raw.shape[1]} bytes are no blocks of {nbytes}")
    if packed.nbytes < _native.packed_bytes(kind, first + len(raw), columns):
        raise ValueError(f"there is no room for rows {first} to {first + len(raw)}")
    return _native.pack_quantised(kind, raw.data_ptr(), first, len(raw), columns, packed.data_ptr())


def unpack_quantised(stored_type: str, packed: torch.Tensor, rows: Sequence[int], out: torch.Tensor) -> None:
    """Put some rows of a packed matrix into `out` [rows, columns] float32, contiguous."""
    _check_contiguous(packed)
    _check_contiguous(out)
    kind = STORED_TYPES.index(stored_type)
    if out.dtype is not torch.float32 or len(out) != len(rows):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; expected float32 [{len(rows)}, columns]")
    last = max(rows, default=0)
    if min(rows, default=0) < 0 or packed.nbytes < _native.packed_bytes(kind, last + 1, out.shape[1]):
        raise ValueError(f"there is no row {last} or less")
    _native.unpack_quantised(kind, packed.data_ptr(), list(rows), out.shape[1], out.data_ptr())


def default_isa() -> str:
    """NEO_DESKTOP_ISA of the environment, else what `follow_isa` was told of, the strongest at first."""
    return os.environ.get("NEO_DESKTOP_ISA") or _chosen_isa()


def follow_isa(choice: Callable[[], str]) -> None:
    """Let `choice` name the instruction set of calls that name none, one of `available_isas()`."""
    global _chosen_isa  # noqa: PLW0603
    _chosen_isa = choice


def read_seconds(tensor: torch.Tensor, num_threads: int = 0) -> float:
    """Seconds that the kernels' thread pool takes to read a contiguous CPU tensor once."""
    _check_contiguous(tensor)
    return _native.read_seconds(tensor.data_ptr(), tensor.nbytes, num_threads)


def read_bandwidth(nbytes: int, num_threads: int = 0, repeats: int = 5) -> float:
    """The best of `repeats` streaming reads of `nbytes` bytes, in GB/s (1e9 bytes per second)."""
    if nbytes < 1 or repeats < 1:
        raise ValueError(f"nbytes and repeats must be at least 1, not {nbytes} and {repeats}")
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    advise_huge_pages(buffer)
    buffer.fill_(1)
    return nbytes / min(read_seconds(buffer, num_threads) for _ in range(repeats)) / 1e9


def fma_rate(
    seconds: float = 0.01,
    num_threads: int = 0,
    isa: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Multiply-adds per second of the kernels' thread pool at its best: in registers, for `seconds` seconds.

    With `dtype` bfloat16 those of the dot-product instructions that the kernels use for bf16, where the
    instruction set has them; in fp32 otherwise.

    Raises:
        ValueError: another dtype, seconds outside (0, 10], a wrong number of threads or instruction set.
    """
    return _native.fma_rate(seconds, num_threads, isa or default_isa(), _DTYPE_CODES.get(dtype, -1))


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages behind a contiguous CPU tensor that was made but not yet written to.

    Large caches are read faster then (fewer TLB misses). Returns whether the system agreed.
    """
    _check_contiguous(tensor)
    return _native.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)


def interleave_numa_nodes(tensor: torch.Tensor) -> bool:
    """Spread a contiguous CPU tensor that was made but not yet written to over all NUMA nodes.

    Large caches are then read with the bandwidth of all nodes. Returns False where there is only one.
    """
    _check_contiguous(tensor)
    return _native.interleave_numa_nodes(tensor.data_ptr(), tensor.nbytes)


def _check_contiguous(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("tensor must be contiguous and on the CPU")


_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def view_of(name: str, tensor: torch.Tensor) -> _View:
    """Return a CPU tensor as the native functions see it; `name` is for their error messages.

    Raises:
        ValueError: it is not on the CPU, or of a layout or dtype that they do not know.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; expected a CPU tensor")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; expected torch.strided")
    code = _DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} has dtype {tensor.dtype}, which the native kernels do not read")
    return tensor.data_ptr(), code, tuple(tensor.shape), tensor.stride()
