"""The limit of open files and connections of this process, and its line in the log."""

import errno
import logging
import resource
import time
from collections.abc import Callable

import psutil

PERIOD_S = 1.0  # between two lines of the log of one kind
_NO_MORE = (errno.EMFILE, errno.ENFILE)


def allow_open_files(count: int) -> int:
    """Raise this process's limit on open files, often 1,024, as far as the system lets it.

    Returns:
        The limit that holds then: less than `count` where the system allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has a lower limit that getrlimit does not say
            return soft
        return wanted
    return soft


def num_open_files() -> int:
    """Return how many files and connections this process has open; 0 where the system does not say."""
    try:
        return int(psutil.Process().num_fds())
    except (psutil.Error, OSError):
        return 0


class OncePerSecond(logging.Filter):
    """Lets one message of a kind through per second, so that no client can fill the log.

    Messages with an exception are of one kind if the exceptions have the same type and number, others if they
    have the same text before its arguments. That no more files can be opened is said without a traceback.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last_s: dict[tuple[object, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        number = error.errno if isinstance(error, OSError) else None
        kind = (record.name, record.msg) if error is None else (record.name, type(error), number)
        now_s = self._clock()
        if now_s < self._last_s.get(kind, float("-inf")) + PERIOD_S:
            return False
        self._last_s = {each: then_s for each, then_s in self._last_s.items() if now_s < then_s + PERIOD_S}
        self._last_s[kind] = now_s
        if number in _NO_MORE:
            record.exc_info = record.exc_text = None
            record.msg, record.args = "%s: close connections, or raise the limit ('ulimit -n')", (error,)
        return True
