"""Waiting for the GPU, which may never answer."""

from typing import Protocol

from neo_desktop.engine.cuda.errors import DeviceStalledError, device_lost, is_device_lost
from neo_desktop.engine.watchdog import Watchdog


class Queried(Protocol):
    """A CUDA stream, or an event on one."""

    def query(self) -> bool:
        """Whether all work on the stream, or before the event, has ended; raises what broke it."""
        ...


def wait_for_gpu(work: Queried, watch: Watchdog, what: object = "its work", timeout: float = 1.0) -> None:
    """Block until work on the GPU has ended.

    Args:
        watch: for how long.
        what: the work, for people.
        timeout: in units of the watch's.

    Raises:
        DeviceStalledError: nothing went on for too long. The GPU cannot be made to stop: whatever it reads
            and writes must stay.
        DeviceLostError: the GPU is lost to this process.
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
