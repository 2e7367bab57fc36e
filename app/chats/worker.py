"""The thread of the store's methods: it runs them in order, and the event loop never waits for the file."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FunctionThread:
    """A thread that calls functions one after the other."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function there; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is under way and end the thread."""
        self._pool.shutdown()
