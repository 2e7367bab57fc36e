"""Waits for the GPU with a timeout."""

from typing import Protocol

from neo_desktop.engine.cuda.errors import DeviceStalledError, device_lost, is_device_lost
from neo_desktop.engine.watchdog import Watchdog


class Queried(Protocol):
    """A CUDA stream, or an event on one."""

    def query(self) -> bool:
        """Return True if all work on the stream, or before the event, has ended; raise the work's error."""
        ...


def wait_for_gpu(work: Queried, watch: Watchdog, what: object = "its work", timeout: float = 1.0) -> None:
    """Block until work on the GPU has ended.

    Args:
        what: Name of the work, for the error message.
        timeout: In units of the watchdog's.

    Raises:
        DeviceStalledError: The watchdog saw no progress for too long. The GPU cannot be stopped, so all
            memory that it reads and writes must stay allocated.
        DeviceLostError: The GPU is lost to this process.
    """
    try:
        has_ended = watch.wait_until(work.query, timeout)
    except RuntimeError as error:
        if is_device_lost(error):
            raise device_lost(error) from error
        raise
    if not has_ended:
        raise DeviceStalledError(
            f"the GPU did not end {what} {watch.words}; it no longer answers, and the engine must be started "
            "again"
        )
