"""Memory that goes back to the system, while its addresses stay taken."""

import ctypes
import mmap

from torch import Tensor

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # None: this system has no such advice


def give_back(memory: Tensor, begin: int) -> int:
    """Give the pages back that lie wholly within the last rows of each part of some memory.

    What they held is lost. A write there takes new pages, a read gives zeros.

    Args:
        memory: [parts, rows, ...], contiguous, in host memory that is not pinned.
        begin: the first row that is not needed.

    Returns:
        The bytes of those pages.

    Raises:
        OSError: the system refuses.
    """
    if _DONT_NEED is None:
        raise OSError("this system takes no memory back from a program that goes on")
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
