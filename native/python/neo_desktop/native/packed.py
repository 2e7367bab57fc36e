"""Products with weights in tiles, quantised or not."""

from collections.abc import Sequence

import torch

from neo_desktop.native import _native
from neo_desktop.native._native import PackedExperts
from neo_desktop.native.arguments import View, check_contiguous, default_isa, view_of

STORED_TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
)  # fmt: skip
"""Of GGUF files, that there are kernels for: the numbers are kept, some in more bits (Q3_K in 6)."""


DENSE_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of weights that are not quantised, behind those in the order of `packed_linear`'s types."""


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


def seen_matrix(matrix: Matrix) -> tuple[Sequence[tuple[int, int, int, int]], View | None]:
    """Return a matrix as the native functions see it."""
    parts, bias = matrix
    return parts, None if bias is None else view_of("bias", bias)


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
    return PackedExperts(count, seen_matrix(gate), seen_matrix(up), seen_matrix(down), clamped)


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
    check_contiguous(raw)
    check_contiguous(packed)
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
    check_contiguous(packed)
    check_contiguous(out)
    kind = STORED_TYPES.index(stored_type)
    if out.dtype is not torch.float32 or len(out) != len(rows):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; expected float32 [{len(rows)}, columns]")
    last = max(rows, default=0)
    if min(rows, default=0) < 0 or packed.nbytes < _native.packed_bytes(kind, last + 1, out.shape[1]):
        raise ValueError(f"there is no row {last} or less")
    _native.unpack_quantised(kind, packed.data_ptr(), list(rows), out.shape[1], out.data_ptr())
