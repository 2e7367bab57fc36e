"""Calls from a thread to the event loop, which makes a few in each of its turns."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable

CALLS_PER_TURN = 16

Call = Callable[[], object]


class Outbox:
    """Hands calls over to an event loop, in order.

    One iteration of the engine may end hundreds of requests. If all that wait for them woke up in the same
    turn of the event loop, all other clients would wait until the last one has written its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._is_draining = False  # the loop's own

    def put(self, calls: Iterable[Call]) -> None:
        """Have these calls made; any thread may ask. Nothing is done once the loop is closed."""
        self._calls.extend(calls)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        for _ in range(min(CALLS_PER_TURN, len(self._calls))):
            self._calls.popleft()()
        self._is_draining = bool(self._calls)
        if self._is_draining:
            self._loop.call_soon(self._drain)
