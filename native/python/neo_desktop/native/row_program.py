"""Steps over rows that run in one native call; see native/include/neo_desktop/row_program.h."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import DTYPE_CODES, View, default_isa, view_of
from neo_desktop.native.packed import Matrix, seen_matrix

ROW_OPS = (
    "multiply", "add_rms_norm", "rms_norm", "layer_norm", "silu_mul", "rope", "copy", "add", "subtract",
    "times", "add_number", "times_number", "silu", "sigmoid", "tanh", "relu", "gelu", "gelu_tanh", "softplus",
)  # fmt: skip
"""Operations of a step, in the order of `RowOp`."""


class Columns(NamedTuple):
    """Columns of a buffer; group g starts at `first + g * stride`."""

    buffer: int
    first: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of one width [n, width]."""

    width: int
    dtype: torch.dtype
    is_given: bool = False  # passed to each call; other buffers are the kernels' memory


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on each row; see `row_program.h` for its sources."""

    op: str  # of `ROW_OPS`
    sources: tuple[Columns, ...]
    into: Columns
    length: int  # of a group in the target
    groups: int = 1  # for matmuls: number of input columns
    number: float = 0.0
    weights: tuple[torch.Tensor, ...] = ()
    matrix: Matrix | None = None


class RowProgram:
    """Steps that run one after the other for each row, on threads that are woken once.

    Keeps the weights alive, but not the matrices' memory.

    Raises:
        ValueError: steps, buffers and weights do not match.
    """

    def __init__(self, buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        self._kept = [weight for step in steps for weight in step.weights]
        self._program = _native.RowProgram(
            [(buffer.width, DTYPE_CODES[buffer.dtype], buffer.is_given) for buffer in buffers],
            [
                (
                    ROW_OPS.index(step.op),
                    step.sources,
                    step.into,
                    step.groups,
                    step.length,
                    step.number,
                    [view_of("weights", weight) for weight in step.weights],
                    None if step.matrix is None else seen_matrix(step.matrix),
                )
                for step in steps
            ],
        )

    def run(self, given: Sequence[View], num_threads: int = 0, *, isa: str | None = None) -> None:
        """Run the steps.

        Args:
            given: the given buffers, in order, each [n, width] with contiguous rows.
            num_threads: 0 means `default_num_threads()`.
            isa: as in `paged_attention_decode`.

        Raises:
            ValueError: shapes or dtypes do not match; nothing was written.
        """
        _native.run_rows(self._program, given, num_threads, isa or default_isa())
