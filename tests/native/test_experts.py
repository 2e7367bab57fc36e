"""MoE results of one native call, against float64."""

from itertools import product
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from neo_desktop import native
from neo_desktop.models.linear.tiles import Tiles

DTYPES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class Layer(NamedTuple):
    """Experts, with the same weights as floats."""

    packed: native.PackedExperts
    matrices: list[Tensor]  # gate, up and down [experts, out, in], in the dtype
    biases: list[Tensor]
    kept: list[Tiles]  # owners of the memory behind `packed`
    clamped: tuple[float, float] | None = None


def layer(
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    seed: int = 0,
    clamped: tuple[float, float] | None = None,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    kept, matrices, biases = [], [], []
    for rows, columns in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)):
        weight = torch.randn(experts * rows, columns, generator=generator) / columns**0.5
        bias = torch.randn(experts * rows, generator=generator).to(dtype)
        tiles = Tiles(experts * rows, columns, bias, dtype)
        tiles.load(0, weight)
        kept.append(tiles)
        matrices.append(weight.to(dtype).view(experts, rows, columns))
        biases.append(bias.view(experts, rows))
    gate, up, down = (tiles.native for tiles in kept)
    packed = native.packed_experts(experts, gate, up, down, clamped)
    return Layer(packed, matrices, biases, kept, clamped)


def given_rows(n: int, k: int, experts: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, hidden, generator=generator).to(dtype)
    ids = torch.rand(n, experts, generator=generator).argsort(1)[:, :k].int().contiguous()
    return x, ids, torch.rand(n, k, generator=generator)


def multiply(of: Layer, x: Tensor, ids: Tensor, weights: Tensor, **how: object) -> Tensor:
    pairs, intermediate = ids.numel(), of.matrices[0].shape[1]
    room = [x.new_full((pairs, width), torch.nan) for width in (2 * intermediate, intermediate, x.shape[1])]
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    native.multiply_experts(of.packed, x, ids, weights, *room, out, **how)  # type: ignore[arg-type]
    return out


def exact(of: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up, down = (
        [(matrix[e].double(), bias[e].double()) for e in range(len(matrix))]
        for matrix, bias in zip(of.matrices, of.biases, strict=True)
    )
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, slot in product(range(len(x)), range(ids.shape[1])):
        e, one = int(ids[row, slot]), x[row].double()
        gates, ups = (weight @ one + bias for weight, bias in (gate[e], up[e]))
        gated = silu(gates) * ups
        if of.clamped is not None:
            alpha, limit = of.clamped
            gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
            gated = (ups + 1) * gates * torch.sigmoid(alpha * gates)
        out[row] += weights[row, slot].double() * (down[e][0] @ gated + down[e][1])
    return out


@given(
    n=st.integers(1, 40),
    experts=st.integers(1, 9),
    sizes=st.tuples(st.sampled_from([16, 32, 112, 1040]), st.sampled_from([16, 48, 208])),
    dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
)
def test_sums_are_those_of_float64_and_rows_do_not_know_of_each_other(
    n: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    of = layer(experts, *sizes, dtype, clamped=data.draw(st.sampled_from([None, (1.702, 7.0), (2.0, 0.5)])))
    x, ids, weights = given_rows(n, k, experts, sizes[0], dtype)
    expected, allowed = exact(of, x, ids, weights), DTYPES[dtype]
    for isa in native.available_isas():
        found = multiply(of, x, ids, weights, isa=isa, num_threads=1)
        torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed * k)
        assert torch.equal(multiply(of, x, ids, weights, isa=isa, num_threads=3), found)
        row = data.draw(st.integers(0, n - 1))
        one = slice(row, row + 1)
        assert torch.equal(multiply(of, x[one], ids[one], weights[one], isa=isa), found[one])


def test_rows_may_be_strided_none_and_all_of_one_expert() -> None:
    of = layer(4, 32, 16, torch.float32)
    x, ids, weights = given_rows(6, 2, 4, 32, torch.float32)
    wide = torch.cat((x, x), 1)
    assert torch.equal(multiply(of, wide[:, :32], ids, weights), multiply(of, x, ids, weights))
    assert multiply(of, x[:0], ids[:0], weights[:0]).shape == (0, 32)
    alike = torch.full_like(ids, 3)
    torch.testing.assert_close(
        multiply(of, x, alike, weights).double(), exact(of, x, alike, weights), rtol=1e-5, atol=1e-5
    )


def test_experts_that_are_none_add_nothing() -> None:
    """Another device has the experts with id -1: the result is the same as with zero weights for them."""
    of = layer(4, 32, 16, torch.float32)
    x, ids, weights = given_rows(6, 2, 4, 32, torch.float32)
    left_out = torch.rand(6, 2) < 0.5
    left_out[3], left_out[4] = True, False
    expected = exact(of, x, ids, weights.masked_fill(left_out, 0.0))
    found = multiply(of, x, ids.masked_fill(left_out, -1), weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not multiply(of, x, torch.full_like(ids, -1), weights).any()


def test_what_is_not_finite_stays_with_its_row() -> None:
    of = layer(4, 32, 16, torch.float32)
    x, ids, weights = given_rows(6, 2, 4, 32, torch.float32)
    expected = multiply(of, x, ids, weights)
    x[2, 3] = torch.nan
    found = multiply(of, x, ids, weights)
    assert found[2].isnan().all()
    others = [row for row in range(6) if row != 2]
    assert torch.equal(found[others], expected[others])


def test_gates_and_ups_may_be_kept_differently() -> None:
    of, half = layer(4, 32, 16, torch.float32), layer(4, 32, 16, torch.bfloat16)
    up = half.kept[1].native[0], of.biases[1].flatten()
    mixed = Layer(
        native.packed_experts(4, of.kept[0].native, up, of.kept[2].native),
        [of.matrices[0], half.matrices[1].float(), of.matrices[2]],
        of.biases,
        of.kept + half.kept,
    )
    x, ids, weights = given_rows(9, 2, 4, 32, torch.float32)
    found, expected = multiply(mixed, x, ids, weights), exact(mixed, x, ids, weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
