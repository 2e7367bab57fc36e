"""All fallback levels of a kernel take the same arguments, and each serves if the level above fails."""

import inspect
from importlib import import_module

import pytest
import torch

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch, in_torch
from neo_desktop.engine.kernels.in_triton import activation
from neo_desktop.models import operators
from neo_desktop.models.linear import grouped

FUNCTIONS = {
    "paged_decode": ("paged_decode",),
    "rope_append": ("rope_append",),
    "norm": ("add_rms_norm",),
    "activation": ("silu_mul",),
    "row_copy": ("write_rows", "read_rows"),
    "quantised": ("multiply_packed", "dequantise"),
    "experts": ("choose_experts", "multiply_experts"),
    "recurrent": ("scan_state", "short_convolution"),
}


@pytest.mark.parametrize(
    ("mechanism", "name"), [(m, name) for m, names in FUNCTIONS.items() for name in names]
)
def test_all_rungs_have_the_same_arguments(mechanism: str, name: str) -> None:
    expected = inspect.signature(getattr(dispatch, name))
    in_triton = import_module(f"neo_desktop.engine.kernels.in_triton.{mechanism}")
    by_torch = {"paged_decode": in_torch, "quantised": grouped}.get(mechanism, operators)
    for module in (in_triton, by_torch):
        assert inspect.signature(getattr(module, name)) == expected


def silu() -> bool:
    gate_up = torch.randn(3, 64)
    out, expected = torch.full((2, 3, 32), torch.nan)
    dispatch.silu_mul(gate_up.clone(), out)
    operators.silu_mul(gate_up, expected)
    return torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        OSError("Python.h"),
    ],
    ids=repr,
)
def test_a_kernel_that_fails_is_given_up_for_torch(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Kernel:
        def __getitem__(self, grid: object) -> object:
            raise error

    monkeypatch.setattr(activation, "_gated", Kernel())
    assert silu()
    assert silu()
    assert fallbacks.limits() == {"activation": "torch"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(error) in line


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("Triton Error [CUDA]: out of memory")], ids=repr
)
def test_no_memory_is_no_reason_to_give_up(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __getitem__(self, grid: object) -> object:
            raise error

    monkeypatch.setattr(activation, "_gated", Kernel())
    with pytest.raises(RuntimeError) as raised:
        silu()
    assert raised.value is error
    assert not fallbacks.limits()
