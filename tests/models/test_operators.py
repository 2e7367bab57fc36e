"""The operators between matmuls against their formulas in double precision."""

import pytest
import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models import native_operators
from neo_desktop.models import operators as in_torch
from neo_desktop.models.operators import Operators, rotation
from neo_desktop.models.rope import RopeConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


@pytest.fixture(params=["torch", *native.available_isas()])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operators:
    if request.param == "torch":
        return in_torch
    monkeypatch.setenv("NEO_DESKTOP_ISA", request.param)
    return native_operators


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, exact: Tensor, roundings: int) -> None:
    """Allow half a unit in the last place per rounding to the dtype, and a little for float32 roundings."""
    tolerance = roundings * torch.finfo(found.dtype).eps / 2 + 16 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 1e-2)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [896, 70])
def test_addition_and_norm(operators: Operators, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((7, hidden), (7, hidden), (hidden,)))
    residual = residual.flip(0)
    residual[2] *= 100.0  # large values occur in trained models
    residual[3] = x[3] = 0.0
    total, out = x + residual, torch.empty_like(x)
    operators.add_rms_norm(x, residual, weight, EPS, out)
    assert torch.equal(residual, total)  # rounded before it is squared
    check(out, exact_norm(total, weight), roundings=2)
    operators.add_rms_norm(x, total, weight, EPS, x)  # out may be x
    check(x, exact_norm(total, weight), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [96, 45])
def test_gated_silu(operators: Operators, columns: int, dtype: torch.dtype) -> None:
    gate_up = 4 * normal(5, 2 * columns, dtype=dtype)
    gate_up[0, :2] = torch.tensor([-1e4, 1e4], dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = torch.empty(5, columns, dtype=dtype)
    operators.silu_mul(gate_up, out)
    check(out, gate * gate.sigmoid() * up, roundings=2)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 10])
def test_rotation_turns_pairs_of_channels_by_angles(
    operators: Operators, head_dim: int, dtype: torch.dtype, is_normed: bool
) -> None:
    heads, kv_heads = 6, 3
    qkv = normal(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qk_norm = normal(heads + kv_heads, head_dim, dtype=dtype) if is_normed else None
    positions, frequencies = torch.tensor([0, 1, 7, 900]), RopeConfig(10_000.0).inverse_frequencies(head_dim)
    cos, sin = torch.empty(2, 4, 1, head_dim)
    rotation(positions, frequencies, 1.2, cos, sin)

    query_key, value = qkv.double().view(4, -1, head_dim).split((heads + kv_heads, kv_heads), dim=1)
    if qk_norm is not None:
        query_key = exact_norm(query_key, qk_norm).to(dtype).double()
    angles = (positions.float()[:, None] * frequencies).double()[:, None]
    turned = torch.complex(*query_key.chunk(2, dim=-1)) * torch.polar(torch.full_like(angles, 1.2), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)

    operators.rope(qkv, cos, sin, kv_heads, qk_norm, EPS)
    found = qkv.view(4, -1, head_dim)
    tolerance = (8 if is_normed else 4) * torch.finfo(dtype).eps
    torch.testing.assert_close(found[:, :-kv_heads].double(), expected, rtol=tolerance, atol=2 * tolerance)
    assert torch.equal(found[:, -kv_heads:].double(), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_row_alone_is_what_it_is_among_others(isa: str, dtype: torch.dtype) -> None:
    """There are enough rows for several threads."""
    rows, heads, dim = 300, 6, 64
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((rows, 384), (rows, 384), (384,)))
    gate_up, qkv = normal(rows, 768, dtype=dtype, seed=1), normal(rows, heads, dim, dtype=dtype, seed=2)
    cos, sin = normal(2, rows, dim, seed=3)
    norm = normal(heads, dim, dtype=dtype)

    def computed(of: slice, threads: int) -> tuple[Tensor, ...]:
        total, normed, gated, turned = residual[of].clone(), x[of].clone(), x[of].clone(), qkv[of].clone()
        native.add_rms_norm(x[of], total, weight, EPS, normed, threads, isa=isa)
        native.silu_mul(gate_up[of], gated, threads, isa=isa)
        native.rope(turned, cos[of], sin[of], norm, EPS, threads, isa=isa)
        return total, normed, gated, turned

    alone = computed(slice(123, 124), 1)
    for threads in (1, 3):
        for one, of_all in zip(alone, computed(slice(None), threads), strict=True):
            assert torch.equal(one[0], of_all[123])
