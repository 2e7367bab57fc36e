"""The limit of open files and connections of this process, and its line in the log."""

import logging
import resource
import time

PERIOD_S = 1.0  # between two lines of the log of one kind


def allow_open_files(count: int) -> int:
    """Raise this process's limit on open files as far as the system lets it; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return count
    wanted = max(soft, count if hard == resource.RLIM_INFINITY else min(count, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class OncePerSecond(logging.Filter):
    """Lets one message of a kind through per second, so that no client can fill the log.

    Messages are of one kind if they have exceptions of one type, or the same text before its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        kind = (record.name, error or record.msg)
        now_s = time.monotonic()
        if now_s < self._last_s.get(kind, float("-inf")) + PERIOD_S:
            return False
        self._last_s[kind] = now_s
        return True
