"""How many files and connections this process may have open."""

import sys

if sys.platform != "win32":
    import resource


def allow_open_files(count: int) -> int:
    """Raise this process's limit on open files, often 1,024, as far as the system lets it.

    Returns:
        How many it is then.
    """
    if sys.platform == "win32":
        return count  # sockets are no files there
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
