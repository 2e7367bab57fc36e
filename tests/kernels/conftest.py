"""The kernels' device: a GPU if available, else Triton's interpreter on CPU tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from fallback_levels import kernels_on
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", params=["triton", "torch"])
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The fallback level of every kernel; the tests pass on both levels."""
    with kernels_on(request.param):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def _interpreter_multiplies_bf16() -> Any:
    """Mend bf16 in the interpreter, which keeps bits in uint16.

    `tl.dot` would multiply these bits (Triton issue 11584), and versions before 3.9 make no bf16 constants.
    """

    def as_float(operand: TensorHandle) -> TensorHandle:
        if operand.data.dtype != np.uint16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def constant(self: InterpreterBuilder, value: float) -> TensorHandle:
        bits = np.array([value], np.float32).view(np.uint32) >> 16
        return TensorHandle(bits.astype(np.uint16), tl.bfloat16)

    dot = InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *others: dot(self, as_float(a), as_float(b), *others),
        )
        patch.setattr(InterpreterBuilder, "get_bf16", constant, raising=False)
        yield
