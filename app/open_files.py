"""How many files and connections this process may have open."""

import sys

if sys.platform != "win32":
    import resource


def allow_open_files(count: int) -> None:
    """Raise this process's limit on open files, often 1,024, as far as the system lets it."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
