"""Functions of CUDA's driver that torch does not offer: green contexts and stream memory operations.

The module calls the driver through NVIDIA's `cuda-bindings`, a dependency of torch's CUDA builds.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import StreamMemoryError, device_lost, is_lost_code

Driver = Any  # the module `cuda.bindings.driver`, or a fake in tests
Library = Any  # a ctypes.CDLL, or a fake in tests

# Constants from CUDA's headers.
_INVALID_VALUE, _INVALID_RESOURCE_CONFIGURATION = 1, 914  # results for an SM count that the GPU cannot split
_WITH_DEFAULT_STREAM = 1  # the only kind of green context that all drivers make
_NON_BLOCKING = 1  # the only kind of stream that a green context has
_WAIT_UNTIL_EQUAL = 1


@cache
def open_driver() -> Driver:
    """Return the module of the driver's functions. Each returns a tuple: the result code, then the outputs.

    Raises:
        RuntimeError: The module is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        major = str(torch.version.cuda).partition(".")[0]
        raise RuntimeError(
            f"Python's bindings to CUDA's driver are missing ({error}). Install them: "
            f"{sys.executable} -m pip install 'cuda-bindings=={major}.*'"
        ) from error
    return driver


def stream_write_value(stream: torch.cuda.Stream, flag: Tensor) -> None:
    """Queue a write of 1 to `flag`, an int32 in pinned host memory, after the stream's earlier work.

    Raises:
        StreamMemoryError: The driver refuses.
        DeviceLostError: The GPU is lost to this process.
    """
    _memory_operation("cuStreamWriteValue32", stream, flag, 0)


def stream_wait_value(stream: torch.cuda.Stream, flag: Tensor) -> None:
    """Block a stream until `flag` is 1; arguments and errors as in `stream_write_value`."""
    _memory_operation("cuStreamWaitValue32", stream, flag, _WAIT_UNTIL_EQUAL)


def _memory_operation(name: str, stream: torch.cuda.Stream, flag: Tensor, flags: int) -> None:
    assert flag.dtype is torch.int32
    try:
        (result,) = getattr(open_driver(), name)(stream.cuda_stream, flag.data_ptr(), 1, flags)
    except RuntimeError as error:  # the driver or its function is missing
        raise StreamMemoryError(str(error)) from error
    if result != 0:
        refusal = StreamMemoryError(f"{name} failed with CUDA driver error {int(result)}")
        raise device_lost(refusal) if is_lost_code(result) else refusal


class GreenContext:
    """A subset of a GPU's multiprocessors (SMs). Kernels and graphs on its streams run on no other SMs.

    torch has a wrapper (`torch.cuda.green_contexts`), but in beta: its arguments change between versions, and
    it does not report the number of SMs.

    Args:
        ordinal: The GPU's index in torch. Its primary context must exist.
        num_sms: At least 1. The GPU may add a few, since it splits at certain SM counts only.

    Raises:
        ValueError: The GPU has fewer SMs, or cannot be split at this count.
        RuntimeError: The driver is too old, or refuses.
    """

    def __init__(self, driver: Driver, ordinal: int, num_sms: int) -> None:
        self._driver = driver
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", ordinal)
        whole = self._call("cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        self.total_sms = int(whole.sm.smCount)
        part = self._part(whole, num_sms)
        self.num_sms = int(part.sm.smCount)
        descriptor = self._call("cuDevResourceGenerateDesc", [part], 1)
        self._context = self._call("cuGreenCtxCreate", descriptor, device, _WITH_DEFAULT_STREAM)

    def stream(self) -> int:
        """Make a stream on these SMs and return its handle. The context owns the stream."""
        return int(self._call("cuGreenCtxStreamCreate", self._context, _NON_BLOCKING, 0))

    def close(self) -> None:
        self._call("cuGreenCtxDestroy", self._context)

    def _part(self, whole: Any, num_sms: int) -> Any:
        total = self.total_sms
        if num_sms > total:
            raise ValueError(
                f"a slice of {num_sms} multiprocessors was asked for, but this GPU has {total}: ask for "
                f"{total} at most"
            )
        if num_sms == total:
            return whole
        result, groups, *_ = self._ask("cuDevSmResourceSplitByCount", 1, whole, 0, num_sms)
        if result in (_INVALID_VALUE, _INVALID_RESOURCE_CONFIGURATION) or (result == 0 and not groups):
            raise ValueError(
                f"this GPU cannot be cut into a slice of {num_sms} of its {total} multiprocessors: ask for "
                f"fewer, or for all {total}"
            )
        _check("cuDevSmResourceSplitByCount", result)
        return groups[0]

    def _call(self, name: str, *arguments: object) -> Any:
        result, *given = self._ask(name, *arguments)
        _check(name, result)
        return given[0] if given else None

    def _ask(self, name: str, *arguments: object) -> Any:
        try:
            return getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # the bindings did not find the function
            raise RuntimeError(
                f"the NVIDIA driver is too old for a slice of the GPU ({error}): update it to one for "
                "CUDA 12.5 or newer, or leave --gpu-slice out"
            ) from error


def _check(name: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(
            f"no slice of the GPU could be made: {name} failed with error {int(result)}. Leave --gpu-slice "
            "out, or try another version of the NVIDIA driver"
        )


@contextmanager
def cublas_sm_target(library: Library, num_sms: int) -> Iterator[None]:
    """Limit cuBLAS to kernels for `num_sms` SMs, for this thread's torch handle and within the block.

    By default cuBLAS looks at the whole GPU and may choose kernels that cannot launch in a green context.
    torch lends its handles to threads, so a thread that ends passes its settings to the next one.
    """
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    before = ctypes.c_int()
    _check("cublasGetSmCountTarget", library.cublasGetSmCountTarget(handle, ctypes.pointer(before)))
    _check("cublasSetSmCountTarget", library.cublasSetSmCountTarget(handle, num_sms))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, before)


@contextmanager
def cublas_lt_sm_target(num_sms: int, total_sms: int) -> Iterator[None]:
    """Limit cuBLASLt to kernels for `num_sms` SMs, within the block and for the whole process.

    torch uses cuBLASLt for layers with a bias.
    """
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(total_sms - num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def cublas_library() -> Library:
    """Return the cuBLAS that torch has loaded.

    Raises:
        RuntimeError: torch did not load cuBLAS as a library. Another copy would not know torch's handles.
    """
    name = f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise RuntimeError(
            f"a slice of the GPU needs torch with {name} as a library of its own, as pip installs it: {error}"
        ) from error
