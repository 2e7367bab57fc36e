"""What an error of the GPU means, whichever library tells of it.

torch's allocator raises `OutOfMemoryError`; its checks of CUDA calls (of graphs: instantiation, launch) raise
`AcceleratorError` with CUDA's code; cuBLAS, cuDNN and Triton raise `RuntimeError` with a text.

Two kinds matter: the GPU had no memory left, so that less may still work; or it is lost to this process, in
which every further call fails or never returns, so that only a new process can go on.
"""

import torch

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what making a handle ends with when there is no memory for it
    "CUDNN_STATUS_ALLOC_FAILED",
)

# After the first ones, CUDA's documentation says, the process must be ended and started again (the codes of
# the runtime and of the driver are the same). The others mean it: the driver or the context is gone, memory
# or links are broken, or the driver does not know what it is, as when a laptop was suspended meanwhile.
# Not among them: 46, a GPU that another program has for itself, and 701, a kernel that asks for too much.
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
    """Nothing can be computed in this process any more: the engine must go on in a new one."""


class DeviceLostError(EngineLostError):
    """The GPU cannot be used by this process any more; no call of CUDA should be made that waits for it."""


class DeviceStalledError(DeviceLostError):
    """The GPU did not end its work within a generous time."""


class StageStalledError(EngineLostError):
    """A thread of this process did not end its work within a generous time, and cannot be stopped."""


class StreamMemoryError(RuntimeError):
    """The driver does not let streams write and wait for words in host memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU had no memory left, so that less may still work."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, EngineLostError):
        return False
    code = getattr(error, "error_code", None)
    return code == _OUT_OF_MEMORY or (code is None and any(t in str(error) for t in _OUT_OF_MEMORY_TEXTS))


def is_lost(error: BaseException) -> bool:
    """Whether nothing more can be computed in this process, as far as the error tells."""
    return isinstance(error, EngineLostError) or is_device_lost(error)


def is_device_lost(error: BaseException) -> bool:
    """Whether the GPU is lost to this process, as far as the error tells.

    cuBLAS and cuDNN do not say why a kernel of theirs failed: the next call of CUDA itself does.
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
    """Whether the GPU is lost to this process after a call of CUDA's runtime or driver that returned this."""
    return code in _LOST


def device_lost(error: BaseException) -> DeviceLostError:
    """Return the error to raise, from the one that told of it."""
    if isinstance(error, DeviceLostError):
        return error
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return DeviceLostError(
        f"the GPU can no longer be used by this process ({said}): start the engine again. If that does not "
        "help, the driver's messages say why (sudo dmesg | grep -i xid), and starting the computer again "
        "brings the GPU back; --device cpu goes on without it"
    )
