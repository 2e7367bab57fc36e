"""What can be put under load, and the open-loop client: each request is sent when it is due.

A closed loop, in which every user waits for an answer before asking again, sends less to a server that gets
slower, and so hides how long people would wait. Here requests queue up as they would in front of a real one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from neo_desktop.engine.stats import EngineStats

Prompt = str | Sequence[int]


class TargetError(RuntimeError):
    """A request that was not answered; without a request, a target that cannot be used.

    Args:
        message: what went wrong and what to do.
        reason: short, and the same for all requests that end for it; None: the message.
        is_refusal: the target did not take the request.
    """

    def __init__(self, message: str, reason: str | None = None, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.is_refusal = is_refusal


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request had in the end, as counted by the target."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, reused from earlier requests
    output_tokens: int


class Target(Protocol):
    """A running engine or server. All of it belongs to one event loop."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of the figures should know, as found out so far."""

    async def start(self) -> None:
        """Get ready for requests; raises TargetError where that is impossible."""

    def make_prompt(self, tokens: int) -> Prompt:
        """Return a prompt of about this many tokens that shares no beginning with any other."""

    def stream(self, prompt: Prompt, max_tokens: int) -> AsyncGenerator[Usage | None]:
        """Yield None whenever a part of the answer has come, then its usage; leaving early ends the request.

        Raises TargetError if the answer, or its rest, will not come.
        """

    def stats(self) -> EngineStats | None:
        """Return the engine's counters; None for a server that keeps them to itself."""

    async def close(self) -> None:
        """End all requests and free everything."""


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"  # not taken: too many wait already, or it does not fit
    FAILED = "failed"  # taken, or perhaps taken, and not answered to its end
    UNFINISHED = "unfinished"  # given up by the client when its time was over


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count for goodput."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's life, in milliseconds of one clock.

    A chunk is a part of the answer that came at once: one token, or several.
    """

    arrival_ms: float  # when it was due to be sent
    sent_ms: float  # when the client got to sending it
    end_ms: float  # when the answer was complete, or the client learnt that it will not be
    chunks_ms: tuple[float, ...]  # when each chunk came; a finished request has one at least
    prompt_tokens: int  # as the server counted them
    cached_tokens: int  # of the prompt, not computed but reused
    output_tokens: int
    outcome: Outcome
    reason: str = ""  # of a failure: short, and the same for all of its kind
    message: str = ""  # of a failure: in full

    @property
    def is_finished(self) -> bool:
        """Whether it was answered to the end."""
        return self.outcome is Outcome.FINISHED

    @property
    def client_lag_ms(self) -> float:
        """How late the client was."""
        return self.sent_ms - self.arrival_ms

    # The rest is for finished requests only.

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from the moment it was due to the first chunk, waiting included."""
        return self.chunks_ms[0] - self.arrival_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: first chunk to end over tokens - 1; None for one token."""
        gaps = self.output_tokens - 1
        return (self.end_ms - self.chunks_ms[0]) / gaps if gaps > 0 else None

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: the gaps between successive chunks."""
        return [later - earlier for earlier, later in zip(self.chunks_ms, self.chunks_ms[1:], strict=False)]

    @property
    def end_to_end_ms(self) -> float:
        """From the moment it was due to the end of its answer."""
        return self.end_ms - self.arrival_ms

    @property
    def per_token_ms(self) -> float:
        """Its whole time divided by its output tokens: the normalised latency of NEO's figure 6."""
        return self.end_to_end_ms / self.output_tokens

    def is_good(self, limits: Limits) -> bool:
        """Whether it was finished within both limits; an answer of one token has no TPOT to be too long."""
        return self.is_finished and self.ttft_ms <= limits.ttft_ms and (self.tpot_ms or 0.0) <= limits.tpot_ms


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
    tasks: list[asyncio.Task[RequestRecord]] = []
    num_ended = 0

    def ended(_: object) -> None:
        nonlocal num_ended
        num_ended += 1
        on_end(num_ended)

    try:
        for request in requests:
            await asyncio.sleep(max(request.arrival_ms / 1e3 - (time.perf_counter() - start), 0.0))
            task = asyncio.create_task(_sent(target, request, start))
            task.add_done_callback(ended)
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def _sent(target: Target, request: ClientRequest, start: float) -> RequestRecord:
    """Send a request now; `start` is that of the client's clock, by perf_counter."""

    def now_ms() -> float:
        return (time.perf_counter() - start) * 1e3

    sent_ms, chunks_ms = now_ms(), []
    usage: Usage | None = None
    end = Outcome.UNFINISHED, "out of time", "not answered when the time for it was over"
    try:
        async with aclosing(target.stream(request.prompt, request.max_tokens)) as answer:
            async for usage in answer:
                if usage is None:
                    chunks_ms.append(now_ms())
    except asyncio.CancelledError:
        pass  # ended by the client: see `end`
    except TargetError as error:
        end = Outcome.REFUSED if error.is_refusal else Outcome.FAILED, error.reason, str(error)
        usage = None
    if usage is not None:
        end = Outcome.FINISHED, "", ""
        if not usage.output_tokens:
            end = Outcome.FAILED, "empty answer", "the answer has no token"
    end_ms, counted = now_ms(), usage or Usage(0, 0, 0)
    return RequestRecord(
        request.arrival_ms,
        sent_ms,
        end_ms,
        tuple(chunks_ms) or (end_ms,),  # an answer without any text comes at its end
        counted.prompt_tokens,
        counted.cached_tokens,
        counted.output_tokens,
        *end,
    )
