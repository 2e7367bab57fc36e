"""Matmuls with weights in tiles, dense or quantised."""

from collections.abc import Sequence

import torch

from neo_desktop.native import _native
from neo_desktop.native._native import PackedExperts
from neo_desktop.native.arguments import View, check_contiguous, default_isa, view_of

STORED_TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
)  # fmt: skip
"""GGUF types with kernels; some take more bits in memory (Q3_K takes 6)."""


DENSE_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of dense weights; in `packed_linear`'s types they follow `STORED_TYPES`."""


def packed_linear(
    x: torch.Tensor,
    parts: Sequence[tuple[int, int, int, int]],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    num_threads: int = 0,
    *,
    isa: str | None = None,
) -> None:
    """Write `x @ weight.T + bias` to `out`, with weights in tiles.

    Quantised weights round x to 8 bits; dense weights sum in fp32. A row's result depends neither on other
    rows nor on threads, and with quantised weights not on the instruction set.

    Args:
        x: [n, columns], fp32, fp16 or bf16; columns is even; for quantised weights a multiple of 32, or
            of 256 for K types. May be strided in n.
        parts: consecutive rows of the weight: type (index into `STORED_TYPES` followed by `DENSE_TYPES`),
            address and bytes of the packed weights, rows. Either all are quantised, or none.
            native/include/neo_desktop/quantised_kernels.h and kernels.h draw the layouts.
        bias: [total rows of the parts] in x's dtype.
        out: [n, total rows of the parts] in x's dtype; may be strided in n; must not overlap x.
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
    """Return a matrix in the form of the native functions."""
    parts, bias = matrix
    return parts, None if bias is None else view_of("bias", bias)


def packed_experts(
    count: int,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    clamped: tuple[float, float] | None = None,
    *,
    gate_by: str = "silu",
) -> PackedExperts:
    """Return a layer's experts in the form of `multiply_experts`; it owns none of the memory.

    Args:
        count: of experts.
        gate: [count * intermediate, hidden], the experts' matrices stacked.
        up: as gate; the same matrix is multiplied once.
        down: [count * hidden, intermediate]
        clamped: alpha and limit for (up + 1) * gate * sigmoid(alpha * gate), with gates of at most the limit
            and ups between -limit and limit; None: silu(gate) * up.
        gate_by: "gelu", approximated by tanh, or "relu" instead of silu.

    Raises:
        ValueError: an expert's rows are not a multiple of 16, or span two parts; or alpha or limit is not
            above 0.
    """
    return PackedExperts(count, seen_matrix(gate), seen_matrix(up), seen_matrix(down), clamped, gate_by)


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
    """Apply the selected experts to the rows, and write the weighted sum of their results to `out`.

    Each expert's weights are read once. Matmuls are those of `packed_linear`; the sum over a row's experts is
    fp32, in the order of its ids. A row's result depends neither on other rows nor on threads.

    Args:
        experts: see `packed_experts`.
        x: [n, hidden], fp32, fp16 or bf16; may be strided in n.
        ids: [n, k] int32, contiguous: expert ids; -1: none.
        weights: [n, k] fp32: routing weights.
        gate_up: [n * k, 2 * intermediate] in x's dtype: scratch, as are the next two.
        gated: [n * k, intermediate]
        products: [n * k, hidden]
        out: [n, hidden] in x's dtype.
        num_threads: 0 means `default_num_threads()`.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    tensors = (
        view_of("x", x),
        view_of("ids", ids),
        view_of("weights", weights),
        view_of("gate_up", gate_up),
        view_of("gated", gated),
        view_of("products", products),
        view_of("out", out),
    )
    _native.multiply_experts(experts, tensors, num_threads, isa or default_isa())


def packed_bytes(stored_type: str, rows: int, columns: int) -> int:
    """Return the bytes of packed rows in one of `STORED_TYPES`."""
    return _native.packed_bytes(STORED_TYPES.index(stored_type), rows, columns)


def pack_quantised(stored_type: str, raw: torch.Tensor, first: int, packed: torch.Tensor) -> bool:
    """Pack rows in the file's format; return False if scales are not finite.

    Args:
        stored_type: one of `STORED_TYPES`.
        raw: [rows, bytes of a row] uint8, contiguous.
        first: index of the first row in the matrix.
        packed: [packed_bytes] uint8 of the matrix.

    Raises:
        ValueError: `packed` is too small, or a row is not a whole number of blocks.
    """
    check_contiguous(raw)
    check_contiguous(packed)
    kind = STORED_TYPES.index(stored_type)
    block, nbytes = _native.stored_block(kind)
    columns = raw.shape[1] // nbytes * block
    if raw.shape[1] % nbytes or not 0 <= first <= first + len(raw):
        raise ValueError(f"rows of {raw.shape[1]} bytes are not whole blocks of {nbytes}")
    if packed.nbytes < _native.packed_bytes(kind, first + len(raw), columns):
        raise ValueError(f"the matrix has no rows {first} to {first + len(raw)}")
    return _native.pack_quantised(kind, raw.data_ptr(), first, len(raw), columns, packed.data_ptr())


def unpack_quantised(stored_type: str, packed: torch.Tensor, rows: Sequence[int], out: torch.Tensor) -> None:
    """Dequantise rows of a packed matrix to `out` [rows, columns] float32, contiguous."""
    check_contiguous(packed)
    check_contiguous(out)
    kind = STORED_TYPES.index(stored_type)
    if out.dtype is not torch.float32 or len(out) != len(rows):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; expected float32 [{len(rows)}, columns]")
    last = max(rows, default=0)
    if min(rows, default=0) < 0 or packed.nbytes < _native.packed_bytes(kind, last + 1, out.shape[1]):
        raise ValueError(f"the matrix lacks some rows up to {last}")
    _native.unpack_quantised(kind, packed.data_ptr(), list(rows), out.shape[1], out.data_ptr())
