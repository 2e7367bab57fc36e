"""Recurrent layers on every fallback level equal the native kernels."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from neo_desktop.engine.kernels.dispatch import scan_state, short_convolution
from neo_desktop.models import native_operators
from neo_desktop.models.recurrent import Spans

pytestmark = pytest.mark.usefixtures("kernel_level")
PROMPTS = [(0, 20, -1, 2), (20, 21, 0, 0), (21, 24, 1, 4), (25, 45, 3, -1)]  # row 24 is padding
CHUNKS = [(0, 37, -1, 2), (37, 38, 0, 0), (38, 86, 1, 4), (87, 95, 3, -1)]
DECODES = [(0, 1, 3, 1), (1, 2, -1, 2), (2, 3, 0, 0), (3, 4, -1, -1)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-7}


def spans_of(spans: Sequence[tuple[int, ...]], device: str | torch.device = "cpu") -> Spans:
    table = torch.tensor(spans, dtype=torch.int32, device=device)
    return Spans(table, max(end - first for first, end, *_ in spans))


def check(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize(("shared", "key_dim", "value_dim"), [(1, 16, 24), (3, 20, 7), (2, 80, 24)])
@pytest.mark.parametrize("spans", [PROMPTS, CHUNKS, DECODES], ids=["prompts", "chunks", "decodes"])
def test_scans_equal_the_native_kernel(
    spans: list[tuple[int, ...]],
    shared: int,
    key_dim: int,
    value_dim: int,
    is_delta: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    rows, heads = spans[-1][1] + 1, 2 * shared
    q, k = (torch.randn(rows, 2, key_dim).mul(0.3).to(dtype) for _ in range(2))
    v, decay = torch.randn(rows, heads, value_dim).to(dtype), -torch.rand(rows, heads)
    beta = torch.rand(rows, heads)
    state = torch.randn(6, heads, key_dim, value_dim)
    after, out, expected = (
        state.to(device, copy=True),
        torch.zeros_like(v, device=device),
        torch.zeros_like(v),
    )
    there = q.to(device), k.to(device), v.to(device), decay.to(device), beta.to(device)
    scan_state(*there, after, spans_of(spans, device), out, is_delta=is_delta)
    native_operators.scan_state(q, k, v, decay, beta, state, spans_of(spans), expected, is_delta=is_delta)
    check(out, expected)
    torch.testing.assert_close(after[:5].cpu(), state[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("width", "has_bias", "has_silu"), [(4, True, True), (3, False, False)])
@pytest.mark.parametrize("spans", [PROMPTS, DECODES], ids=["prompts", "decodes"])
def test_convolutions_equal_the_native_kernel(
    spans: list[tuple[int, ...]],
    width: int,
    has_bias: bool,
    has_silu: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(spans[-1][1] + 1, 70).to(dtype), torch.randn(width, 70)
    bias, state = torch.randn(70) if has_bias else None, torch.randn(6, width - 1, 70)
    after, out, expected = (
        state.to(device, copy=True),
        torch.zeros_like(x, device=device),
        torch.zeros_like(x),
    )
    there = x.to(device), weight.to(device), None if bias is None else bias.to(device)
    short_convolution(*there, after, spans_of(spans, device), out, has_silu=has_silu)
    native_operators.short_convolution(x, weight, bias, state, spans_of(spans), expected, has_silu=has_silu)
    check(out, expected)
    assert torch.equal(after[:5].cpu(), state[:5])
