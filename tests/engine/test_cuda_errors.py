"""Errors of a GPU, as the libraries above it tell them."""

import pytest
import torch

from neo_desktop.engine.cuda.errors import is_out_of_memory


def accelerator_error(text: str, code: int) -> Exception:
    """What torch raises when a call of CUDA's runtime fails."""
    error = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        accelerator_error("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_out_of_memory_has_many_names(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("CUDA error: an illegal memory access was encountered", 700),
        accelerator_error("CUDA error: out of memory, says the text of another error", 719),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        ValueError("out of memory"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)
