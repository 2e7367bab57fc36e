"""Names of processes, to find out whether the owner of something is alive."""

import os

import psutil

CLOCK_TOLERANCE_S = 5.0  # processes report slightly different start times


def this_process() -> str:
    """Return a unique name of this process: its number and start time."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def is_alive(owner: str) -> bool:
    """Return True if the process with that name still runs."""
    pid, _, start_s = owner.partition("@")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(start_s)) < CLOCK_TOLERANCE_S
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True  # the process exists, and its start time is unknown
