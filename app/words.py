"""Figures, times and errors as people read them."""

import errno
from math import ceil

_REASONS = {
    errno.ENOENT: "there is no such file or folder",
    errno.EISDIR: "this is a folder, not a file",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EACCES: "access is not allowed: look at its permissions",
    errno.EPERM: "access is not allowed: look at its permissions",
    errno.EROFS: "this disk can only be read",
    errno.ENOSPC: "the disk is full",
}
# Errors that a person can mend: memory, files, settings. All others are defects.
EXPECTED = (ValueError, MemoryError, OSError, RuntimeError)


def number(value: float) -> str:
    """Return a number with about three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Return a size in decimal units, as disks and downloads have it: "1.5 GB", "98 MB"."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{ceil(num_bytes / 1e3)} kB"


def binary_size(num_bytes: float) -> str:
    """Return a size in binary units, as caches and pieces of memory have it: "32 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:  # more would be 1e+03 in three digits
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def large_count(count: float) -> str:
    """Return a count: "1.5 billion", "98 million"."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} billion"
    return f"{count / 1e6:.0f} million" if count >= 1e6 else f"{count:,.0f}"


def duration(ms: float) -> str:
    """Return a time in milliseconds below a second, else in seconds or minutes."""
    if ms < 999.5:
        return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
    seconds = ms / 1e3
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min"


def error_text(error: BaseException) -> str:
    """Return what to tell a person of an error.

    An expected error has a sentence of its own. The system's errors come without `[Errno 2]`, with the name
    of the file first. An unexpected error has its type before its text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        reason = _REASONS.get(error.errno, (error.strerror or "it cannot be used").lower())
        return reason if error.filename is None else f"{error.filename}: {reason}"
    text = str(error)
    return text if text and isinstance(error, EXPECTED) else f"{type(error).__name__}: {text}".rstrip(": ")
