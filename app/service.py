"""The way from the event loop to an engine and back.

    event loop                          engine: a thread, or a process of its own (app/engines)
    ──────────                          ──────
    submit() ──── commands ──────────→  carried out before an iteration is planned
    Generation ←─ one wake-up per step ── outputs of all requests, and how the engine stands

Everything here, the generations included, belongs to the event loop; events are brought to it by an `Outbox`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from neo_desktop.app.chat_template import ChatTemplateError
from neo_desktop.app.engines.messages import (
    Abort,
    Add,
    Answer,
    Compile,
    Ended,
    EngineLink,
    Event,
    Look,
    Status,
    Stepped,
    Stop,
)
from neo_desktop.app.engines.thread import EngineThread
from neo_desktop.app.outbox import Call, Outbox
from neo_desktop.app.template_process import TemplateProcess
from neo_desktop.app.web.limits import DEFAULT_LIMITS, Limits
from neo_desktop.app.web.metrics import ServiceMetrics
from neo_desktop.engine.engine import ContextLengthError, Engine
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.request import FinishReason, RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
from neo_desktop.engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_UNREAD_OUTPUTS = 16_384  # of one generation; nobody reads it then
CHARS_PER_TOKEN = 8  # more than texts have on average; prose has about 4
SHORT_CHARS = 2000
STOP_TIMEOUT_S = 5.0  # how long stop() waits for the iteration that runs

WATCH_TICKS = 10  # in a patience: a program that was halted for hours has missed one of them, not all

Prompt = str | Sequence[int]
Supervisor = Callable[[str], str]  # what happened → what those who wait are told


class ServiceError(RuntimeError):
    """A request that the service could not take or could not finish."""

    code = "unavailable"  # for programs


class ServiceBusyError(ServiceError):
    """The queue is full; the same request may succeed later."""

    code = "queue_full"


class ServiceStoppedError(ServiceError):
    """The service is stopping or has stopped."""

    code = "shutting_down"


class EngineFailedError(ServiceError):
    """The engine gave the request up."""

    code = "engine_failed"


class EngineRestartingError(EngineFailedError):
    """The engine ended and is being started again; the same request may succeed later."""

    code = "engine_restarting"


class RequestTimeoutError(ServiceError):
    """The request took longer than it may."""

    code = "timeout"


class UnreadError(ServiceError):
    """Nobody read what was generated."""

    code = "unread"


class Generation:
    """The outputs of the prompts of one `submit`, as they come; leaving the `async with` aborts what is open.

    Iterating gives (index, output) until all outputs have ended, with index = prompt * n + choice.

    Raises:
        EngineFailedError, ServiceStoppedError, RequestTimeoutError, UnreadError: while iterating, when the
            rest will not come.
    """

    def __init__(self, request_ids: Sequence[str], n: int, close: Callable[["Generation"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.n = n
        self.prompt_token_ids: Sequence[Sequence[int]] = ()  # of each prompt, once it was accepted
        self._close = close
        self._num_open = len(self.request_ids) * n
        self._timer: asyncio.TimerHandle | None = None
        self._arrived: asyncio.Queue[RequestOutput | ServiceError] = asyncio.Queue()
        # Whether the engine has taken all prompts; raises what it raised.
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        first_index = {request_id: i * self.n for i, request_id in enumerate(self.request_ids)}
        while self._num_open:
            output = await self._arrived.get()
            if isinstance(output, ServiceError):
                raise output.with_traceback(None)  # one error is told to many
            if output.finish_reason is FinishReason.ERROR:
                raise EngineFailedError(output.error)
            if output.finish_reason is not None:
                self._num_open -= 1
            yield first_index[output.request_id] + output.choice, output

    def close(self) -> None:
        """Abort what has not ended; its memory is free before the next iteration."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)

    def put(self, output: RequestOutput) -> None:
        """Take in what one iteration brought."""
        self._arrived.put_nowait(output)
        if self._arrived.qsize() > MAX_UNREAD_OUTPUTS:
            self.give_up(UnreadError("the answer was not read for too long"))

    def limit_time(self, seconds: float) -> None:
        """Give up what has not ended by then."""
        reason = RequestTimeoutError(f"the request took more than {seconds:g} s, which is the limit")
        self._timer = asyncio.get_running_loop().call_later(seconds, self.give_up, reason)

    def give_up(self, reason: ServiceError) -> None:
        """Abort what is open and tell its reader why."""
        self.fail(reason)
        self.close()

    def fail(self, error: ServiceError) -> None:
        """End everything that is open with this error."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen, also where nobody waits for it any more
        self._arrived.put_nowait(error)


class EngineService:
    """Runs an engine for many clients of one event loop.

    Args:
        engine: one that works beside the event loop already, or one that a thread is made for; nobody else
            may call it between `start` and the end of `stop`.
        limits: what requests may take.
    """

    def __init__(self, engine: Engine | EngineLink, limits: Limits = DEFAULT_LIMITS) -> None:
        self._link: EngineLink = EngineThread(engine) if isinstance(engine, Engine) else engine
        facts = self._link.facts
        self.model_name = facts.model_name
        self.max_context_tokens = facts.max_context_tokens
        self.tokenizer = facts.tokenizer
        self.sampling_defaults = facts.sampling_defaults
        self._template = TemplateProcess(facts.tokenizer.chat_template, facts.tokenizer.special_tokens)
        self.stats: EngineStats = facts.stats  # as of the last iteration or command
        self.metrics = ServiceMetrics()
        self.supervisor: Supervisor | None = None  # asked when the engine ends by itself
        self._limits = limits
        self._engine_ended = asyncio.Event()
        self._outbox: Outbox | None = None  # None: not started
        self._ordinals = itertools.count()
        self._generations: dict[str, Generation] = {}  # request_id -> whose it is
        self._queued: set[tuple[str, int]] = set()  # (request_id, choice) without a first token
        self._asked: dict[int, asyncio.Future[Any]] = {}  # ticket -> who waits for the engine's answer
        self._num_heard = 0  # events of the engine's so far
        self._watch: asyncio.Task[None] | None = None
        self._refusal: ServiceError | None = ServiceStoppedError("the service has not been started")
        self._successor: Callable[[], Awaitable[EngineService]] | None = None
        self._idle_since_s: float | None = time.monotonic()

    async def start(self) -> None:
        """Start the engine's work; outputs go to the running event loop."""
        self._outbox = Outbox(asyncio.get_running_loop())
        await self._template.start()
        self._refusal = None
        self._link.start(self._receive)
        if self._link.patience_s is not None:
            self._watch = asyncio.create_task(self._watch_progress(self._link.patience_s))

    async def stop(
        self,
        reason: str = "the server is shutting down",
        *,
        timeout_s: float | None = STOP_TIMEOUT_S,
        successor: "Callable[[], Awaitable[EngineService]] | None" = None,
    ) -> None:
        """Tell everybody who waits, free what they hold and end the engine; a second call does nothing.

        Args:
            reason: what those who wait are told.
            timeout_s: an iteration cannot be interrupted: after this time it is left to itself. None: never,
                unless the engine has a process of its own, which `close` ends all the same.
            successor: brings the service that takes what is submitted from now on; None: it is refused.
        """
        if self._outbox is None or isinstance(self._refusal, ServiceStoppedError):
            return
        if timeout_s is None and self._link.is_process:
            timeout_s = STOP_TIMEOUT_S
        self._successor = successor
        self._refuse_all(ServiceStoppedError(reason))
        self._link.send(Stop())
        await self._template.stop()
        try:
            await asyncio.wait_for(self._engine_ended.wait(), timeout_s)
        except TimeoutError:
            logger.warning("the engine is still busy with an iteration; not waiting for it")
        if self._watch is not None:
            self._watch.cancel()

    def close(self) -> None:
        """Drop weights and caches, if the engine has ended or was never started, or has its own process."""
        self._link.close()

    @property
    def is_process(self) -> bool:
        """Whether the engine has a process of its own."""
        return self._link.is_process

    @property
    def refusal(self) -> ServiceError | None:
        """Why new requests are refused at present; None when they are not."""
        return None if self._successor is not None else self._refusal

    @property
    def num_queued(self) -> int:
        """Outputs that wait for their first token."""
        return len(self._queued)

    @property
    def idle_since_s(self) -> float | None:
        """Since when nobody waits for anything, on the monotonic clock; None while somebody does."""
        return self._idle_since_s

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> str:
        """Return a chat as the model's template writes it, for the assistant's next message.

        Raises:
            ChatTemplateError: see `TemplateProcess.render`; or there are too many messages.
        """
        if len(messages) > self._limits.max_messages:
            raise ChatTemplateError(
                f"the chat has {len(messages)} messages, but {self._limits.max_messages} is the limit"
            )
        if self._successor is not None:
            return await (await self._successor()).render_chat(messages, extra)
        return await self._template.render(messages, extra)

    async def live_view(self) -> LiveView:
        """Ask the engine what it does right now; it answers between two iterations.

        Raises:
            ServiceStoppedError, EngineFailedError: there is no engine any more.
        """
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        answer: asyncio.Future[LiveView] = asyncio.get_running_loop().create_future()
        self._ask(Look(next(self._ordinals)), answer)
        return await answer

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, add_special_tokens: bool = True
    ) -> Generation:
        """Queue prompts and wait until the engine has accepted all of them.

        Args:
            prompts: texts or token ids.
            add_special_tokens: let the tokenizer put its special tokens around texts.

        Raises:
            ServiceBusyError: too many requests are waiting.
            ServiceStoppedError, EngineFailedError: the service takes no requests any more.
            ContextLengthError, ValueError: the engine cannot take a prompt; none is run then.
        """
        if self._successor is not None:
            return await (await self._successor()).submit(
                prompts, params, add_special_tokens=add_special_tokens
            )
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        num_outputs, most = len(prompts) * params.n, self._limits.max_queued_requests
        if num_outputs > most:
            raise ValueError(
                f"{num_outputs} outputs at once are more than the {most} that may wait: "
                "send fewer prompts per request or lower n"
            )
        if len(self._queued) + num_outputs > most:
            raise ServiceBusyError(
                f"{len(self._queued)} requests are waiting already, at most {most} may: try again later"
            )
        request_ids = [str(next(self._ordinals)) for _ in prompts]
        generation = Generation(request_ids, params.n, self._close)
        if self._limits.request_timeout_s is not None:
            generation.limit_time(self._limits.request_timeout_s)
        self.metrics.arrived(request_ids)
        self._generations |= dict.fromkeys(request_ids, generation)
        self._idle_since_s = None
        self._queued |= _choices(generation)
        try:
            if params.grammar is not None:  # before, so that the engine finds it ready
                compiled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._ask(Compile(next(self._ordinals), params.grammar), compiled)
                await compiled
            token_ids = [await self._encode(prompt, add_special_tokens) for prompt in prompts]
            generation.prompt_token_ids = token_ids
            self._ask(Add(next(self._ordinals), request_ids, token_ids, params), generation.accepted)
            await generation.accepted
        except BaseException:  # cancelled included
            generation.close()
            raise
        return generation

    async def embed(self, prompts: Sequence[Prompt], pooling: Pooling) -> list[tuple[list[float], int]]:
        """Return each prompt's embedding, of length 1, and its number of tokens; errors as of `submit`."""
        async with await self.submit(prompts, SamplingParams(pooling=pooling)) as generation:
            found = {index: output async for index, output in generation if output.embedding is not None}
        return [
            (embedding.tolist(), found[index].num_prompt_tokens)
            for index in range(len(prompts))
            if (embedding := found[index].embedding) is not None
        ]

    async def _encode(self, prompt: Prompt, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) <= SHORT_CHARS:  # takes less than the way to a thread and back
            return self._encode_text(prompt, add_special_tokens)
        # In a thread: long texts take seconds.
        return await asyncio.to_thread(self._encode_text, prompt, add_special_tokens)

    def _encode_text(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        # A text that is far too long is refused for its beginning; all of it might take minutes.
        beginning = text[: self.max_context_tokens * CHARS_PER_TOKEN]
        token_ids = self.tokenizer.encode(beginning, add_special_tokens)
        if len(beginning) == len(text):
            return token_ids
        if len(token_ids) > self.max_context_tokens:
            raise ContextLengthError(
                f"the prompt has more tokens than the {self.max_context_tokens} that the context holds "
                "including the answer: shorten the prompt"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def _close(self, generation: Generation) -> None:
        self._queued -= _choices(generation)
        for request_id in generation.request_ids:
            self.metrics.left(request_id, generation.n)
            if self._generations.pop(request_id, None) is not None:
                self._link.send(Abort(request_id))
        if not self._generations:
            self._idle_since_s = time.monotonic()

    def _ask(self, command: Add | Compile | Look, answer: "asyncio.Future[Any]") -> None:
        """Send a command; its answer comes unless the engine ends, which is told instead."""
        if self._refusal is not None:  # it ended while the prompt was made ready
            raise self._refusal.with_traceback(None)
        self._asked[command.ticket] = answer
        self._link.send(command)

    def _answer(self, answer: Answer) -> None:
        self._num_heard += 1
        asked = self._asked.pop(answer.ticket, None)
        if asked is None or asked.done():  # whoever asked has gone
            return
        if answer.error is None:
            asked.set_result(answer.value)
        else:
            asked.set_exception(answer.error)

    def _book(self, event: Stepped | Status) -> None:
        self._num_heard += 1
        self.stats = event.stats
        if isinstance(event, Stepped):
            self.metrics.iteration(event.seconds)

    def _deliver(self, output: RequestOutput) -> None:
        generation = self._generations.get(output.request_id)
        if generation is not None:  # otherwise closed while the iteration ran
            self._queued.discard((output.request_id, output.choice))
            self.metrics.gained(output)
            generation.put(output)

    def _refuse_all(self, reason: ServiceError) -> None:
        """End all generations, and every later one, for this reason."""
        self._refusal = reason
        for generation in set(self._generations.values()):
            generation.fail(reason)
            generation.close()
        while self._asked:
            _, asked = self._asked.popitem()
            if not asked.done():
                asked.set_exception(reason)

    def _end(self, reason: str | None) -> None:
        """The engine has ended."""
        self._engine_ended.set()
        if reason is None or isinstance(self._refusal, ServiceStoppedError):
            return
        if self._watch is not None:
            self._watch.cancel()
        if self.supervisor is None:
            self._refuse_all(EngineFailedError(f"{reason}: restart the server"))
        else:
            self._refuse_all(EngineRestartingError(self.supervisor(reason)))

    async def _watch_progress(self, patience_s: float) -> None:
        """End an engine that has work, and says nothing for too long."""
        num_heard, num_silent = -1, 0
        while num_silent < WATCH_TICKS:
            await asyncio.sleep(patience_s / WATCH_TICKS)
            has_work = bool(self._asked) or self.stats.num_running + self.stats.num_waiting > 0
            num_silent = num_silent + 1 if has_work and self._num_heard == num_heard else 0
            num_heard = self._num_heard
        self._link.kill(f"the engine had work and made no progress for {patience_s:g} s, so it was ended")

    # From here on: a thread of the engine's.

    def _receive(self, events: Sequence[Event]) -> None:
        assert self._outbox is not None
        self._outbox.put(call for event in events for call in self._calls(event))

    def _calls(self, event: Event) -> Iterator[Call]:
        match event:
            case Stepped():
                yield partial(self._book, event)
                for output in event.outputs:
                    yield partial(self._deliver, output)
            case Status():
                yield partial(self._book, event)
            case Answer():
                yield partial(self._answer, event)
            case Ended():
                yield partial(self._end, event.reason)


def _choices(generation: Generation) -> set[tuple[str, int]]:
    return set(itertools.product(generation.request_ids, range(generation.n)))
