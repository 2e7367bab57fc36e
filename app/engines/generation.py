"""The outputs of a request, on their way from the service to its reader."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from neo_desktop.app import errors
from neo_desktop.engine.request import FinishReason, RequestOutput

MAX_UNREAD_OUTPUTS = 16_384  # of one generation; beyond that, its reader counts as gone


class Generation:
    """The outputs of the prompts of one `submit`, as they come; leaving the `async with` aborts what is open.

    Iterating gives (index, output) until all outputs have ended, with index = prompt * n + choice. It raises
    ServiceError when the rest will not come.
    """

    def __init__(self, request_ids: Sequence[str], n: int, close: Callable[["Generation"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.n = n
        self.choices = set(itertools.product(self.request_ids, range(n)))  # its outputs: (request_id, choice)
        self.prompt_token_ids: Sequence[Sequence[int]] = ()  # by prompt, after preparation
        self.failure: errors.ServiceError | None = None  # why the rest will not come
        self.arrived_s = time.monotonic()
        self.first_s: dict[tuple[str, int], float] = {}  # (request_id, choice) → when its first token came
        self._close = close
        self._num_open = len(self.choices)
        self._timer: asyncio.TimerHandle | None = None
        self._arrived: asyncio.Queue[RequestOutput | errors.ServiceError] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        first_index = {request_id: i * self.n for i, request_id in enumerate(self.request_ids)}
        while self._num_open:
            output = await self._arrived.get()
            if isinstance(output, errors.ServiceError):
                raise output.with_traceback(None)  # many readers get the same error
            if output.finish_reason is FinishReason.DEAD_END:
                raise errors.DeadEndError(output.error or "")
            if output.finish_reason is FinishReason.ERROR:
                raise errors.EngineFailedError(output.error or "")
            if output.finish_reason is not None:
                self._num_open -= 1
            yield first_index[output.request_id] + output.choice, output

    def close(self) -> None:
        """Abort what has not ended; its memory is free before the next iteration."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)

    def put(self, output: RequestOutput) -> None:
        self._arrived.put_nowait(output)
        if self._arrived.qsize() > MAX_UNREAD_OUTPUTS:
            self.give_up(errors.ServiceError("the answer was not read for too long", "unread"))

    def limit_time(self, seconds: float) -> None:
        """Give up what has not ended by then."""
        message = f"the request took more than {seconds:g} s, which is the limit"
        reason = errors.ServiceError(message, "timeout")
        self._timer = asyncio.get_running_loop().call_later(seconds, self.give_up, reason)

    def give_up(self, reason: errors.ServiceError) -> None:
        """Abort what is open and tell its reader why."""
        self.fail(reason)
        self.close()

    def fail(self, error: errors.ServiceError) -> None:
        """End everything that is open with this error."""
        self.failure = self.failure or error
        self._arrived.put_nowait(error)
