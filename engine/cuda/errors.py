"""What an error of the GPU means, whichever library tells of it.

torch's allocator raises `OutOfMemoryError`; its checks of CUDA calls (of graphs: instantiation, launch) raise
`AcceleratorError` with CUDA's code; cuBLAS, cuDNN and Triton raise `RuntimeError` with a text.
"""

import torch

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what making a handle ends with when there is no memory for it
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU had no memory left, so that less may still work."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    code = getattr(error, "error_code", None)
    return code == _OUT_OF_MEMORY or (code is None and any(t in str(error) for t in _OUT_OF_MEMORY_TEXTS))
