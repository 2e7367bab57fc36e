"""The engine's thread, and the way from the event loop to it and back.

    event loop                           engine thread
    ──────────                           ─────────────
    submit() ──── inbox: commands ────→  before an iteration is planned: run the commands
                                         while there is work: engine.step()
    Generation ←─ one wake-up per step ── outputs of all requests

The thread alone calls the engine. Everything else here, the generations included, belongs to the event loop;
the two meet only in `_inbox`, in `call_soon_threadsafe` and in the frozen snapshot `stats`.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from neo_desktop.app.chat_template import ChatTemplateError
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

Prompt = str | Sequence[int]
Command = Callable[[], object]


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
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts; raises what it raised."""
        await self._accepted

    def settle(self, error: Exception | None) -> None:
        """Take in whether the engine accepted the prompts."""
        if not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)

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
        self.settle(error)
        self._arrived.put_nowait(error)


class EngineService:
    """Runs an engine for many clients of one event loop.

    Args:
        engine: nobody else may call it between `start` and the end of `stop`.
        limits: what requests may take.
    """

    def __init__(self, engine: Engine, limits: Limits = DEFAULT_LIMITS) -> None:
        self.model_name = engine.model_name
        self.max_context_tokens = engine.max_context_tokens
        self.tokenizer = engine.tokenizer
        self.sampling_defaults = engine.config.generation
        self._template = TemplateProcess(engine.tokenizer.chat_template, engine.tokenizer.special_tokens)
        self.stats: EngineStats = engine.stats()  # as of the last iteration or command
        self.metrics = ServiceMetrics()
        self._limits = limits
        self._engine = engine
        self._grammars = engine.grammars  # any thread may use it
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False  # the thread's own
        self._thread_ended = asyncio.Event()
        self._outbox: Outbox | None = None  # None: not started
        self._ordinals = itertools.count()
        self._generations: dict[str, Generation] = {}  # request_id -> whose it is
        self._queued: set[tuple[str, int]] = set()  # (request_id, choice) without a first token
        self._looks: set[asyncio.Future[LiveView]] = set()  # of those who want to know what the engine does
        self._refusal: ServiceError | None = ServiceStoppedError("the service has not been started")
        self._successor: Callable[[], Awaitable[EngineService]] | None = None
        self._idle_since_s: float | None = time.monotonic()

    async def start(self) -> None:
        """Start the engine thread; outputs go to the running event loop."""
        self._outbox = Outbox(asyncio.get_running_loop())
        await self._template.start()
        self._refusal = None
        self._thread.start()

    async def stop(
        self,
        reason: str = "the server is shutting down",
        *,
        timeout_s: float | None = STOP_TIMEOUT_S,
        successor: "Callable[[], Awaitable[EngineService]] | None" = None,
    ) -> None:
        """Tell everybody who waits, free what they hold and end the thread; a second call does nothing.

        Args:
            reason: what those who wait are told.
            timeout_s: an iteration cannot be interrupted: after this time it is left to itself. None: never.
            successor: brings the service that takes what is submitted from now on; None: it is refused.
        """
        if self._outbox is None or isinstance(self._refusal, ServiceStoppedError):
            return
        self._successor = successor
        self._refuse_all(ServiceStoppedError(reason))
        self._inbox.put(None)
        await self._template.stop()
        try:
            await asyncio.wait_for(self._thread_ended.wait(), timeout_s)
        except TimeoutError:
            logger.warning("the engine is still busy with an iteration; not waiting for it")

    def close(self) -> None:
        """Drop weights and caches, if the engine's thread has ended or was never started; else do nothing."""
        if self._thread_ended.is_set():
            self._thread.join()
        if not self._thread.is_alive():
            self._engine.close()

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
        self._looks.add(answer)
        self._inbox.put(partial(self._look, answer))
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
            if params.grammar is not None:  # in a thread, so that the engine finds it ready
                await asyncio.to_thread(self._grammars.compile, params.grammar)
            token_ids = [await self._encode(prompt, add_special_tokens) for prompt in prompts]
            generation.prompt_token_ids = token_ids
            self._inbox.put(partial(self._add, generation, token_ids, params))
            await generation.accepted()
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
                self._inbox.put(partial(self._abort, request_id))
        if not self._generations:
            self._idle_since_s = time.monotonic()

    def _answer(self, look: asyncio.Future[LiveView], view: LiveView) -> None:
        self._looks.discard(look)
        if not look.done():  # otherwise whoever asked has gone
            look.set_result(view)

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
        while self._looks:
            if not (look := self._looks.pop()).done():
                look.set_exception(reason)

    # From here on: the engine thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_commands(wait=not self._engine.has_work)
                if self._engine.has_work and not self._is_stopping:
                    self._step()
        except Exception as error:
            # A failed iteration is the engine's own business (it ends the requests concerned). What comes
            # up to here is a defect, after which no state can be trusted.
            logger.exception("the engine stopped")
            reason = f"the engine stopped because of an internal error ({error}): restart the server"
            self._post(partial(self._refuse_all, EngineFailedError(reason)))
        self._post(self._thread_ended.set)

    def _run_commands(self, wait: bool = False) -> None:
        """Run all commands that came in; `wait` for one if there are none."""
        with contextlib.suppress(queue.Empty):
            while not self._is_stopping:
                command = self._inbox.get(block=wait)
                wait = False
                if command is None:
                    self._is_stopping = True
                else:
                    command()
        self.stats = self._engine.stats()

    def _step(self) -> None:
        begun_s = time.perf_counter()
        outputs = self._engine.step(before_next=self._run_commands)
        self.metrics.iteration(time.perf_counter() - begun_s)
        self.stats = self._engine.stats()
        if outputs:
            self._post(*(partial(self._deliver, output) for output in outputs))

    def _add(self, generation: Generation, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        error = None
        try:
            for request_id, token_ids in zip(generation.request_ids, prompts, strict=True):
                self._engine.add_request(request_id, token_ids, params)
        except Exception as refused:  # told to the caller, who aborts the prompts before this one
            error = refused
        self._post(partial(generation.settle, error))

    def _look(self, answer: asyncio.Future[LiveView]) -> None:
        self._post(partial(self._answer, answer, self._engine.live_view()))

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def _post(self, *calls: Call) -> None:
        assert self._outbox is not None
        self._outbox.put(calls)


def _choices(generation: Generation) -> set[tuple[str, int]]:
    return set(itertools.product(generation.request_ids, range(generation.n)))
