"""Green contexts, by the driver's own functions: some of a GPU's multiprocessors (SMs), and streams on them.

torch wraps them, too (`torch.cuda.green_contexts`), but in beta: its arguments change from version to
version, and it does not tell how many SMs it got.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Library = Any  # a ctypes.CDLL, or what tests put in its place

_FUNCTIONS = (
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
)
_INVALID_VALUE, _INVALID_RESOURCE_CONFIGURATION = 1, 914  # results for SMs that cannot be split like that
_SM_RESOURCE = 1
_WITH_DEFAULT_STREAM = 1  # the only kind of green context that all drivers make
_NON_BLOCKING = 1  # the only kind of stream that a green context has


class SmResource(ctypes.Structure):
    """CUdevResource, of SMs. What follows their number differs between drivers: there is room for all."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("header", ctypes.c_ubyte * 92),
        ("num_sms", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 412),
    )


class GreenContext:
    """Some of a GPU's SMs. Kernels and graphs on its streams run on no others.

    Args:
        library: the driver's, see `driver_library`.
        ordinal: the GPU's number, as torch counts them. Its primary context must exist.
        num_sms: how many, at least 1. The GPU may give a few more: it can be cut in certain places only.

    Raises:
        ValueError: the GPU has fewer SMs, or cannot be cut like that.
        RuntimeError: the driver is too old, or refuses.
    """

    def __init__(self, library: Library, ordinal: int, num_sms: int) -> None:
        self._library = library
        missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
        if missing:
            raise RuntimeError(
                f"the NVIDIA driver is too old for a slice of the GPU (it has no {missing[0]}): update it to "
                "one for CUDA 12.5 or newer, or leave --gpu-slice out"
            )
        device, whole = ctypes.c_int(), SmResource()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.pointer(device), ordinal)
        self._call("cuDeviceGetDevResource", device, ctypes.pointer(whole), _SM_RESOURCE)
        self.total_sms = int(whole.num_sms)
        part = self._part(whole, num_sms)
        self.num_sms = int(part.num_sms)
        descriptor, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.pointer(descriptor), ctypes.pointer(part), 1)
        self._call("cuGreenCtxCreate", ctypes.pointer(self._handle), descriptor, device, _WITH_DEFAULT_STREAM)

    def stream(self) -> int:
        """Make a stream on these SMs, and return its handle; it exists as long as the context."""
        stream = ctypes.c_void_p()
        self._call("cuGreenCtxStreamCreate", ctypes.pointer(stream), self._handle, _NON_BLOCKING, 0)
        return stream.value or 0

    def close(self) -> None:
        """Give it back; nobody may use its streams any more."""
        self._call("cuGreenCtxDestroy", self._handle)

    def _part(self, whole: SmResource, num_sms: int) -> SmResource:
        total = self.total_sms
        if num_sms > total:
            raise ValueError(
                f"a slice of {num_sms} multiprocessors was asked for, but this GPU has {total}: ask for "
                f"{total} at most"
            )
        if num_sms == total:
            return whole
        part, rest, groups = SmResource(), SmResource(), ctypes.c_uint(1)
        result = self._library.cuDevSmResourceSplitByCount(
            *(ctypes.pointer(each) for each in (part, groups, whole, rest)), 0, num_sms
        )
        if result in (_INVALID_VALUE, _INVALID_RESOURCE_CONFIGURATION) or (result == 0 and groups.value == 0):
            raise ValueError(
                f"this GPU cannot be cut into a slice of {num_sms} of its {total} multiprocessors: ask for "
                f"fewer, or for all {total}"
            )
        _check("cuDevSmResourceSplitByCount", result)
        return part

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._library, name)(*arguments))


def _check(name: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(
            f"no slice of the GPU could be made: {name} failed with error {result}. Leave --gpu-slice out, "
            "or try another version of the NVIDIA driver"
        )


@contextmanager
def cublas_sm_target(library: Library, num_sms: int) -> Iterator[None]:
    """Let torch's cuBLAS, as this thread uses it, choose kernels for so many SMs within the block.

    It looks at the whole GPU otherwise, and some of the kernels that it then chooses cannot be launched in a
    green context. torch lends its handles to threads: one that has ended leaves its settings to the next.
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
    """The same for cuBLASLt, which torch uses for layers with a bias; this setting is the process's."""
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(total_sms - num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def driver_library() -> Library:
    """Return libcuda, which every NVIDIA driver brings.

    Raises:
        RuntimeError: it is not there.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"a slice of the GPU needs the NVIDIA driver's library: {error}") from error


def cublas_library() -> Library:
    """Return the cuBLAS that torch has loaded.

    Raises:
        RuntimeError: there is none. Another one would be of no use: its handles are not torch's.
    """
    name = f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise RuntimeError(
            f"a slice of the GPU needs torch with {name} as a library of its own, as pip installs it: {error}"
        ) from error
