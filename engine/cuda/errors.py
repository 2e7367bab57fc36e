"""Classification of GPU errors, independent of the library that raises them.

torch's allocator raises `OutOfMemoryError`; its checks of CUDA calls (of graphs: instantiation, launch) raise
`AcceleratorError` with CUDA's code; cuBLAS, cuDNN and Triton raise `RuntimeError` with a text.

Two kinds matter. If the GPU ran out of memory, a smaller batch may still work. If the GPU is lost to this
process, every further call fails or never returns, and only a new process can continue.
"""

import torch

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # creating a handle without enough memory
    "CUDNN_STATUS_ALLOC_FAILED",
)

# The first set: CUDA's documentation says that the process must be restarted (runtime and driver share the
# codes). The second set implies it: the driver or the context is gone, memory or links are broken. The driver
# may also fail to name the cause, for example after a laptop was suspended.
# Excluded: 46, a GPU in exclusive use by another program, and 701, a kernel with too large a launch request.
_LOST = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}) | {4, 214, 220, 709, 999}
_LOST_TEXTS = (
    "driver shutting down",  # 4
    "uncorrectable ECC error",  # 214
    "uncorrectable NVLink error",  # 220
    "Invalid access of peer GPU memory over nvlink or a hardware error",  # 226
    "an illegal memory access was encountered",  # 700
    "the launch timed out and was terminated",  # 702
    "context is destroyed",  # 709
    "device-side assert triggered",  # 710
    "hardware stack error",  # 714
    "an illegal instruction was encountered",  # 715
    "misaligned address",  # 716
    "operation not supported on global/shared address space",  # 717
    "invalid program counter",  # 718
    "unspecified launch failure",  # 719
    "unknown error",  # 999
)


class EngineLostError(RuntimeError):
    """The engine cannot compute anything in this process any more and must restart in a new one."""


class DeviceLostError(EngineLostError):
    """The GPU is lost to this process, which must not make CUDA calls that wait for it."""


class DeviceStalledError(DeviceLostError):
    """The GPU did not finish its work within the timeout."""


class StageStalledError(EngineLostError):
    """A thread of this process did not finish its work within the timeout and cannot be stopped."""


class StreamMemoryError(RuntimeError):
    """The driver does not support stream memory operations on host memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the GPU ran out of memory, so that a smaller batch may still work."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, EngineLostError):
        return False
    code = getattr(error, "error_code", None)
    return code == _OUT_OF_MEMORY or (code is None and any(t in str(error) for t in _OUT_OF_MEMORY_TEXTS))


def is_short_of_memory(error: BaseException) -> bool:
    """Return True if the GPU or the host ran out of memory."""
    return isinstance(error, MemoryError) or is_out_of_memory(error)


def is_lost(error: BaseException) -> bool:
    """Return True if the error shows that this process cannot compute anything any more."""
    return isinstance(error, EngineLostError) or is_device_lost(error)


def is_device_lost(error: BaseException) -> bool:
    """Return True if the error shows that the GPU is lost to this process.

    cuBLAS and cuDNN do not say why one of their kernels failed; the next CUDA call does.
    """
    if isinstance(error, DeviceLostError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    code = getattr(error, "error_code", None)
    if code is not None:
        return code in _LOST
    return "CUDA" in (text := str(error)) and any(t in text for t in _LOST_TEXTS)


def is_lost_code(code: int) -> bool:
    """Return True if this result of CUDA means that the GPU is lost to this process."""
    return code in _LOST


def device_lost(error: BaseException) -> DeviceLostError:
    """Convert an error that reports a lost GPU to the error to raise."""
    if isinstance(error, DeviceLostError):
        return error
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return DeviceLostError(
        f"the GPU can no longer be used by this process ({said}): start the engine again. If that does not "
        "help, the driver's messages say why (sudo dmesg | grep -i xid), and restarting the computer resets "
        "the GPU; --device cpu runs without it"
    )
