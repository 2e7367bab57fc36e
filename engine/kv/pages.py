"""Memory pages returned to the system, while the addresses stay reserved."""

import ctypes
import mmap

from torch import Tensor

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # None: this OS has no MADV_DONTNEED


def give_back(memory: Tensor, begin: int) -> int:
    """Return the pages wholly within the last rows of every part to the system.

    Their content is lost. A later write takes new pages, a later read returns zeros.

    Args:
        memory: [parts, rows, ...], contiguous, in host memory that is not pinned.
        begin: The first unneeded row.

    Returns:
        The number of bytes given back.

    Raises:
        OSError: The system refuses.
    """
    if _DONT_NEED is None:
        raise OSError("this system takes no memory back from a running program (no MADV_DONTNEED)")
    num_bytes = 0
    for part in memory:
        start = part.data_ptr() + begin * part.stride(0) * part.element_size()
        end = part.data_ptr() + part.numel() * part.element_size()
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= end:
            continue
        if _madvise(start, end - start, _DONT_NEED) != 0:
            raise OSError(ctypes.get_errno(), "the system refuses to take pages back")
        num_bytes += end - start
    return num_bytes


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return int(function(address, num_bytes, advice))
