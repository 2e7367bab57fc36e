"""Recorded native calls are repeated with the present contents of their tensors, or not at all."""

import pytest
import torch

from neo_desktop import native
from neo_desktop.native import Recording, recorded


def test_a_recording_repeats_every_call_with_new_contents() -> None:
    gate_up, gated, normed = torch.randn(3, 64), torch.zeros(3, 32), torch.zeros(3, 32)
    residual, weight = torch.zeros(3, 32), torch.ones(32)

    def work() -> None:
        native.silu_mul(gate_up, gated)
        native.add_rms_norm(gated, residual, weight, 1e-6, normed)

    calls = recorded(work)
    assert isinstance(calls, Recording)
    gate_up.normal_()
    residual.zero_()
    calls()
    expected = torch.nn.functional.silu(gate_up[:, :32]) * gate_up[:, 32:]
    torch.testing.assert_close(gated, expected)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(expected, (32,), eps=1e-6))


def test_work_that_torch_or_numbers_of_python_decide_is_not_recorded() -> None:
    rows, out = torch.randn(4, 32), torch.zeros(4, 16)
    assert recorded(lambda: rows.add_(1)) is None
    assert recorded(lambda: native.silu_mul(rows, torch.empty(4, 16))) is None  # its result has new memory
    assert recorded(lambda: native.silu_mul(rows.view(2, 2, 32).flatten(0, 1), out)) is not None
    with torch.inference_mode():
        assert recorded(lambda: native.silu_mul(torch.ones(32, 4).t().contiguous(), out)) is None
        strided = rows.t().contiguous().t()
        assert recorded(lambda: native.silu_mul(strided.contiguous(), out)) is None
        assert recorded(lambda: native.silu_mul(rows.contiguous(), out)) is not None
    stored = torch.zeros(native.packed_bytes("Q8_0", 32, 32), dtype=torch.uint8)
    assert recorded(lambda: native.unpack_quantised("Q8_0", stored, [0], torch.zeros(1, 32))) is None


def test_errors_leave_no_recording_behind() -> None:
    with pytest.raises(ValueError, match="gate_up"):
        recorded(lambda: native.silu_mul(torch.zeros(1, 4), torch.zeros(1, 3)))
    gated = torch.zeros(1, 2)
    native.silu_mul(torch.ones(1, 4), gated)
    calls = recorded(lambda: None)
    assert calls is not None
    gated.zero_()
    calls()
    assert not gated.any()
