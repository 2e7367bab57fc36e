"""GPU errors as the libraries above CUDA report them."""

import pytest
import torch
from fake_cuda import accelerator_error

from neo_desktop.engine.cuda.errors import (
    DeviceStalledError,
    StageStalledError,
    device_lost,
    is_device_lost,
    is_lost,
    is_out_of_memory,
)


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


LOST = [
    accelerator_error("CUDA error: an illegal memory access was encountered", 700),
    accelerator_error("CUDA error: the launch timed out and was terminated", 702),
    accelerator_error("CUDA error: device-side assert triggered", 710),
    accelerator_error("CUDA error: unspecified launch failure", 719),
    accelerator_error("CUDA error: uncorrectable ECC error encountered", 214),
    accelerator_error("CUDA error: unknown error", 999),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    DeviceStalledError("the GPU did not end layer 3"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_gpu_has_many_names(error: Exception) -> None:
    assert is_device_lost(error)
    assert is_lost(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("CUDA error: out of memory", 2),
        accelerator_error("CUDA error: too many resources requested for launch", 701),
        accelerator_error("CUDA error: CUDA-capable device(s) is/are busy or unavailable", 46),
        accelerator_error("CUDA error: invalid argument, where an unknown error is mentioned", 1),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("unknown error of something else"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_a_gpu_that_goes_on_is_not_taken_for_lost(error: BaseException) -> None:
    assert not is_lost(error)


def test_a_thread_that_hangs_ends_the_engine_but_not_the_gpu() -> None:
    error = StageStalledError("the CPU did not end layer 3")
    assert is_lost(error)
    assert not is_device_lost(error)


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_gpu_is_told_in_a_sentence_that_keeps_the_cause(error: Exception) -> None:
    assert str(error) in str(device_lost(error))
