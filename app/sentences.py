"""Times and errors as a person reads them."""

import errno

_REASONS = {
    errno.ENOENT: "there is no such file or folder",
    errno.EISDIR: "this is a folder, not a file",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EACCES: "access is not allowed: look at its permissions",
    errno.EPERM: "access is not allowed: look at its permissions",
    errno.EROFS: "this disk can only be read",
    errno.ENOSPC: "the disk is full",
}


def duration(ms: float) -> str:
    """Milliseconds below a second, else seconds or minutes."""
    if ms < 999.5:
        return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
    seconds = ms / 1e3
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min"


def sentence(error: BaseException) -> str:
    """Return an error's own words; the system's errors without `[Errno 2]`, with the file's name first."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = _REASONS.get(error.errno, (error.strerror or "it cannot be used").lower())
        return reason if error.filename is None else f"{error.filename}: {reason}"
    return str(error)
