"""The open-loop client: each request is sent when it is due.

A closed loop, in which every user waits for an answer before asking again, sends less to an engine that gets
slower, and so hides how long people would wait. Here requests queue up as they would in front of a server.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from neo_desktop.app.service import EngineService
from neo_desktop.app.service_errors import ServiceError
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.stats import EngineStats

OUT_OF_TIME = "out of time"


class TargetError(RuntimeError):
    """A request without an answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request had in the end."""

    prompt_tokens: int
    output_tokens: int


class EngineTarget:
    """An engine with the thread that serves it in `neo-desktop serve`, but without HTTP.

    Prompts are random token ids; answers have exactly as many tokens as are asked for.

    Args:
        engine: closed in the end; nothing else may call it meanwhile.
        seed: of the prompts.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._service = EngineService(engine)
        self._random = random.Random(seed)

    @property
    def model(self) -> str:
        """The model's name."""
        return self._engine.model_name

    async def start(self) -> None:
        """Start the engine's thread."""
        await self._service.start()

    def make_prompt(self, tokens: int) -> list[int]:
        """Return random token ids."""
        return self._random.choices(range(self._engine.config.vocab_size), k=tokens)

    async def stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[Usage | None]:
        """Yield None for each iteration with a token, then the usage; leaving early ends the request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        try:
            async with await self._service.submit([prompt], params) as generation:
                async for _, output in generation:
                    if output.tokens:
                        yield None
        except (ContextLengthError, ServiceError) as error:
            raise TargetError(str(error)) from None
        yield Usage(output.num_prompt_tokens, output.num_output_tokens)

    def stats(self) -> EngineStats:
        """Return the counters as of the last iteration."""
        return self._service.stats

    async def close(self) -> None:
        """End the engine's thread and drop weights and caches."""
        try:
            await self._service.stop()
        finally:
            self._engine.close()


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
    prompt_tokens: int
    output_tokens: int
    error: str = ""  # why it was not answered to the end

    @property
    def is_finished(self) -> bool:
        """It was answered to the end."""
        return not self.error

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

    def is_good(self, limits: Limits) -> bool:
        """It was finished within both limits; an answer of one token has no TPOT to be too long."""
        return self.is_finished and self.ttft_ms <= limits.ttft_ms and (self.tpot_ms or 0.0) <= limits.tpot_ms


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What to send, and when, counted from the start."""

    arrival_ms: float
    prompt: Sequence[int]
    max_tokens: int


async def send_all(
    target: EngineTarget,
    requests: Sequence[ClientRequest],
    drain_s: float | None = None,
    on_end: Callable[[int], None] = lambda num_ended: None,
) -> list[RequestRecord]:
    """Send all requests at their times and return what became of each, in their order.

    Cancelled, or with an error of ours, it ends all requests before it returns.

    Args:
        requests: by rising arrival time.
        drain_s: seconds after the last arrival when those still open are ended; None: never.
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


async def _sent(target: EngineTarget, request: ClientRequest, start: float) -> RequestRecord:
    """Send a request now; `start` is that of the client's clock, by perf_counter."""

    def now_ms() -> float:
        return (time.perf_counter() - start) * 1e3

    sent_ms, chunks_ms = now_ms(), []
    usage: Usage | None = None
    error = OUT_OF_TIME
    try:
        async with aclosing(target.stream(request.prompt, request.max_tokens)) as answer:
            async for usage in answer:
                if usage is None:
                    chunks_ms.append(now_ms())
    except asyncio.CancelledError:
        usage = None  # ended by the client
    except TargetError as failure:
        usage, error = None, str(failure)
    end_ms, counted = now_ms(), usage or Usage(0, 0)
    return RequestRecord(
        request.arrival_ms,
        sent_ms,
        end_ms,
        tuple(chunks_ms) or (end_ms,),
        counted.prompt_tokens,
        counted.output_tokens,
        "" if usage is not None else error,
    )
