"""Matmuls of linear layers in every format against double precision, and the weights read back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense, Plain
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.tiles import Tiles
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(rows: int, columns: int, dtype: torch.dtype, *, has_bias: bool, seed: int = 0) -> Plain:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if has_bias else None
    return Plain(weight, bias)


def loaded(linear: Linear, plain: Plain) -> Linear:
    """Load another layer's weights and bias, in parts."""
    for row in range(0, len(plain.weight), 100):
        linear.load(row, plain.weight[row : row + 100])
    if plain.bias is not None and linear.bias is not None:
        linear.bias.copy_(plain.bias)
    return linear


def forms_of(plain: Plain) -> list[Linear]:
    """Return the layer in every format of its dtype."""
    weight, bias = plain.weight, plain.bias
    rows, columns = weight.shape
    made = [
        Plain(torch.empty_like(weight), None if bias is None else torch.empty_like(bias)),
        DENSE.empty(rows, columns, has_bias=bias is not None, dtype=weight.dtype, device=CPU),
    ]
    return [plain, *(loaded(linear, plain) for linear in made)]


def check(linear: Linear, plain: Plain, x: Tensor) -> None:
    """Assert an error of float32 sums, in any order, rounded once to the dtype."""
    weight, bias = plain.weight.double(), 0.0 if plain.bias is None else plain.bias.double()
    exact = x.double() @ weight.T + bias
    magnitude = x.double().abs() @ weight.abs().T + abs(bias)
    sum_error = (x.shape[1] + 2) * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(plain.weight.dtype)
    rounding, least = info.eps / 2, info.tiny * info.eps  # the spacing of subnormal numbers
    product = linear.multiply(x, x.new_empty(len(x), len(plain.weight)))
    assert product.dtype is plain.weight.dtype
    assert product.shape == exact.shape
    error = (product.double() - exact).abs()
    assert (error <= sum_error * magnitude + rounding * exact.abs() * (1 + sum_error) + least).all()


sizes = st.one_of(st.integers(1, 70), st.integers(1, 600))


@given(sizes, sizes, sizes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_products_are_as_exact_as_sums_in_float32(
    count: int, rows: int, columns: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    plain = layer(rows, columns, dtype, has_bias=has_bias, seed=seed)
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for linear in forms_of(plain):
        check(linear, plain, x)
        assert torch.equal(linear.dense(), plain.weight)
        assert linear.bias is not None or not has_bias
        nbytes = DENSE.nbytes(rows, columns, dtype) if linear.form == "tiles" else plain.weight.nbytes
        assert linear.memory() == {CPU: nbytes + (plain.bias.nbytes if plain.bias is not None else 0)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_of_the_size_of_torchs_own(dtype: torch.dtype) -> None:
    plain = layer(300, 4864, dtype, has_bias=True)
    x = torch.randn(33, 4864, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    room = x.new_empty(33, 300)
    products = [linear.multiply(x, room).double() for linear in forms_of(plain)]
    errors = [(product - exact).square().mean().sqrt() for product in products]
    assert max(errors) <= 4 * errors[0]  # sums differ in order only; 16-bit products would show as 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_be_strided_or_empty(dtype: torch.dtype) -> None:
    plain = layer(40, 24, dtype, has_bias=True)
    wide = torch.randn(6, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    for linear in forms_of(plain):
        for x in (wide[:, ::2], wide[:, :24], wide[:0, :24]):
            expected = plain.multiply(x.contiguous(), x.new_empty(len(x), 40))
            found = linear.multiply(x, x.new_empty(len(x), 40))
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_row_alone_has_the_product_that_it_has_among_others(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEO_DESKTOP_ISA", isa)
    plain = layer(90, 130, dtype, has_bias=True)
    linear = loaded(DENSE.empty(90, 130, has_bias=True, dtype=dtype, device=CPU), plain)
    x = torch.randn(37, 130, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(linear, plain, x)
    products = linear.multiply(x, x.new_empty(37, 90))
    for row in (0, 8, 36):
        alone = linear.multiply(x[row : row + 1], x.new_empty(1, 90))
        assert torch.equal(alone[0], products[row])


def test_rows_can_be_looked_up_and_come_in_any_pieces() -> None:
    for dtype in DTYPES:
        plain = layer(70, 34, dtype, has_bias=False)
        tiles = Tiles(70, 34, None, dtype)
        for first, last in ((0, 5), (5, 16), (16, 50), (50, 51), (51, 70)):
            tiles.load(first, plain.weight[first:last])
        assert torch.equal(tiles.dense(), plain.weight)
        rows, found = torch.tensor([69, 0, 33, 33]), torch.empty(4, 34, dtype=dtype)
        tiles.look_up(rows, found)
        assert torch.equal(found, plain.weight[rows])


@pytest.mark.parametrize("tied", [False, True])
def test_a_cpu_keeps_tiles_and_a_tied_head_is_not_held_twice(
    tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    config = replace(shape("tiny"), tie_word_embeddings=tied)
    decoder = random_model(config, dtype=torch.float32, device=CPU)
    assert "weights of the layers: tiles; of the head: tiles" in caplog.messages
    assert (decoder.lm_head is decoder.embedding) == tied
    assert decoder.nbytes == config.weight_bytes(torch.float32)


def copied(model: Decoder, **options: Any) -> Decoder:
    copy = Decoder(model.config, dtype=model.dtype, device=CPU, **options)
    for target, source in zip(named_weights(copy), named_weights(model), strict=True):
        target.load(0, source.dense())
    return copy


def test_a_model_computes_the_same_in_any_form() -> None:
    model = random_model(shape("tiny"), dtype=torch.float32, device=CPU)
    plain = copied(model, form=Dense(uses_tiles=False))
    assert {linear.form for linear in plain.linears()} == {"plain"}
    found, expected = (logits_of_all(each, torch.arange(9)) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
