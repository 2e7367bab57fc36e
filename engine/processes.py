"""Which process something belongs to, and whether that still lives."""

import os

import psutil

CLOCK_TOLERANCE_S = 5.0  # start times are told to differ a little by the processes that ask


def this_process() -> str:
    """A name for this process that no later one has: its number, and when it started."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def is_alive(owner: str) -> bool:
    """Whether the process of that name still runs."""
    pid, _, start_s = owner.partition("@")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(start_s)) < CLOCK_TOLERANCE_S
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True  # there is one, and nothing says that it is another
