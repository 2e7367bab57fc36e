"""An open-loop client: each request is sent when it is due, whatever became of those before it.

A closed loop, in which every user waits for an answer before asking again, sends less to a server that gets
slower, and so hides how long people would wait. Here requests queue up as they would in front of a real one.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from neo_desktop.app.bench.load.target import Outcome, Prompt, RequestRecord, Target, TargetError, Usage


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What to send, and when, counted from the start."""

    arrival_ms: float
    prompt: Prompt
    max_tokens: int


async def send_all(
    target: Target,
    requests: Sequence[ClientRequest],
    drain_s: float | None = None,
    on_end: Callable[[int], None] = lambda num_ended: None,
) -> list[RequestRecord]:
    """Send all requests at their times and return what became of each, in their order.

    Cancelled, or with an error of ours, it ends all requests before it returns.

    Args:
        requests: by rising arrival time.
        drain_s: seconds after the last arrival when those still open are ended, as unfinished; None: never.
        on_end: called with the number of requests that have ended, each time one does.
    """
    start = time.perf_counter()
    watched = [_Watched(target, request, start) for request in requests]
    tasks: list[asyncio.Task[None]] = []
    num_ended = 0

    def ended(_: object) -> None:
        nonlocal num_ended
        num_ended += 1
        on_end(num_ended)

    try:
        for one in watched:
            await asyncio.sleep(max(one.request.arrival_ms / 1e3 - (time.perf_counter() - start), 0.0))
            task = asyncio.create_task(one.run())
            task.add_done_callback(ended)
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):  # TargetErrors have become records: this is a defect
            raise result
    return [one.record() for one in watched]


@dataclass(slots=True)
class _Watched:
    """One request on its way."""

    target: Target
    request: ClientRequest
    start: float  # of the client's clock, by perf_counter
    sent_ms: float = 0.0
    end_ms: float = 0.0
    chunks_ms: list[float] = field(default_factory=list)
    usage: Usage | None = None
    error: TargetError | None = None

    async def run(self) -> None:
        self.sent_ms = self._now_ms()
        try:
            async with aclosing(self.target.stream(self.request.prompt, self.request.max_tokens)) as chunks:
                async for chunk in chunks:
                    self.usage = chunk.usage
                    if chunk.usage is None:
                        self.chunks_ms.append(self._now_ms())
        except TargetError as error:
            self.error = error
        finally:
            self.end_ms = self._now_ms()

    def record(self) -> RequestRecord:
        usage = self.usage or Usage(0, 0)
        outcome, reason, message = Outcome.FINISHED, "", ""
        if self.error is not None:
            outcome = Outcome.REFUSED if self.error.is_refusal else Outcome.FAILED
            reason, message = self.error.reason, str(self.error)
        elif self.usage is None:
            outcome, reason = Outcome.UNFINISHED, "out of time"
            message = "not answered when the time for it was over"
        elif not usage.output_tokens:
            outcome, reason, message = Outcome.FAILED, "empty answer", "the answer has no token"
        return RequestRecord(
            arrival_ms=self.request.arrival_ms,
            sent_ms=self.sent_ms,
            end_ms=self.end_ms,
            chunks_ms=tuple(self.chunks_ms) or (self.end_ms,),  # an answer without any text comes at its end
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            outcome=outcome,
            reason=reason,
            message=message,
        )

    def _now_ms(self) -> float:
        return (time.perf_counter() - self.start) * 1e3
