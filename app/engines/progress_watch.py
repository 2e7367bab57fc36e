"""The end of an engine that has work, and makes no progress."""

import asyncio
from collections.abc import Callable

from neo_desktop.app.engines.messages import EngineLink

TICKS = 10  # in a timeout: a program that was halted for hours has missed one tick, not all


def watch(
    link: EngineLink, timeout_s: float, num_heard: Callable[[], int], has_work: Callable[[], bool]
) -> asyncio.Task[None]:
    """Start a task that kills an engine which has work, and says nothing for too long.

    Args:
        num_heard: returns the number of its events so far.
    """
    return asyncio.create_task(_watch(link, timeout_s, num_heard, has_work))


async def _watch(
    link: EngineLink, timeout_s: float, num_heard: Callable[[], int], has_work: Callable[[], bool]
) -> None:
    before, num_silent = -1, 0
    while num_silent < TICKS:
        await asyncio.sleep(timeout_s / TICKS)
        num_silent = num_silent + 1 if has_work() and num_heard() == before else 0
        before = num_heard()
    link.kill(f"the engine had work and made no progress for {timeout_s:g} s, so it was ended")
