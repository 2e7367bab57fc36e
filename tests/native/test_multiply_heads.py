"""Heads times matrices of their own, compared with torch in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop import native

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@given(
    sizes=st.tuples(
        st.integers(0, 3), st.integers(1, 5), st.integers(1, 40), st.sampled_from((1, 7, 64, 515))
    ),
    dtype=st.sampled_from(tuple(BOUNDS)),
    is_transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_torch(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, is_transposed: bool, seed: int
) -> None:
    n, heads, rows, columns = sizes
    torch.manual_seed(seed)
    x = torch.randn(n, heads, rows + 2).to(dtype)[..., :rows]
    shape = (heads, columns, rows + 3) if is_transposed else (heads, rows + 3, columns)
    matrices = torch.randn(shape).to(dtype)
    matrices = matrices[..., 2:-1].transpose(1, 2) if is_transposed else matrices[:, 2:-1]
    out = torch.full((n, heads, columns + 1), 7.0, dtype=dtype)
    for isa in native.available_isas():
        native.multiply_heads(x, matrices, out[..., :columns], isa=isa)
        expected = torch.einsum("nhr,hrc->nhc", x.double(), matrices.double())
        off = (out[..., :columns].double() - expected).norm()
        assert off <= BOUNDS[dtype] * (x.double().norm() * matrices.double().norm() + expected.norm())
        assert (out[..., columns:] == 7).all()


def test_wrong_arguments_are_refused() -> None:
    x, matrices, out = torch.zeros(2, 3, 4), torch.zeros(3, 4, 5), torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match="matrices"):
        native.multiply_heads(x, matrices[:2], out)
    with pytest.raises(ValueError, match="contiguous"):
        native.multiply_heads(x, torch.zeros(3, 8, 10)[:, ::2, ::2], out)
    with pytest.raises(ValueError, match="dtype"):
        native.multiply_heads(x, matrices.half(), out)
