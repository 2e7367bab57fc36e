"""Norm and activation equal the models' operators, and round at the same places as the decoder."""

import pytest
import torch
from torch import Tensor

from neo_desktop.engine.kernels.dispatch import add_rms_norm
from neo_desktop.engine.kernels.in_triton.activation import gated
from neo_desktop.models import expert_operators, operators
from neo_desktop.models.experts_config import ClampedGate, Gating

pytestmark = pytest.mark.usefixtures("kernel_level")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def check(found: Tensor, expected: Tensor, most_changed: float = 0.005) -> None:
    found = found.cpu()
    if found.dtype is torch.float16:  # rounding at any other place would change many more
        assert (found != expected).float().mean() < most_changed
    # For bf16 up to three units in the last place: the interpreter truncates, a GPU rounds.
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3 * 2**-7}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("hidden", [64, 896, 4096, 5120])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addition_and_norm_equal_the_decoder(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(7, hidden).to(dtype) for _ in range(2))
    residual[2] *= 100.0  # large values occur in trained models
    residual[3] = x[3] = 0.0
    weight = torch.rand(hidden).to(dtype)
    on_device, out = residual.to(device, copy=True), torch.empty_like(x, device=device)
    add_rms_norm(x.to(device), on_device, weight.to(device), EPS, out)
    expected = torch.empty_like(x)
    operators.add_rms_norm(x, residual, weight, EPS, expected)
    check(on_device, residual)
    check(out, expected)


def test_norm_may_overwrite_what_was_added(device: torch.device) -> None:
    x, residual, weight = torch.randn(3, 128), torch.randn(3, 128), torch.rand(128)
    on_device, expected = x.to(device, copy=True), torch.empty_like(x)
    add_rms_norm(on_device, residual.to(device, copy=True), weight.to(device), EPS, on_device)
    operators.add_rms_norm(x, residual, weight, EPS, expected)
    check(on_device, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # intended: 1 / inf is 0
@pytest.mark.parametrize("intermediate", [96, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["silu", "gelu", "relu", ClampedGate(limit=1.5)], ids=str)
def test_gates_equal_the_decoder(
    how: Gating, intermediate: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(5, 2 * intermediate)).to(dtype)
    gate_up[0, :2] = torch.tensor([-1e4, 1e4], dtype=dtype)
    out = torch.empty(5, intermediate, dtype=dtype, device=device)
    gated(gate_up.to(device, copy=True), how, out)
    gates, ups = gate_up.chunk(2, dim=1)
    expected = expert_operators.gated(gates, ups, how)
    check(out, expected, most_changed=0.1 if how == "gelu" else 0.005)  # torch's 1 + tanh loses digits
