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
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Self

from neo_desktop.engine.engine import ContextLengthError, Engine
from neo_desktop.engine.request import FinishReason, RequestOutput
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_QUEUED_REQUESTS = 1024
CHARS_PER_TOKEN = 8  # more than texts have on average; prose has about 4
STOP_TIMEOUT_S = 5.0  # how long stop() waits for the iteration that runs

Prompt = str | Sequence[int]
Command = Callable[[], object]


class ServiceError(RuntimeError):
    """A request that the service could not take or could not finish."""


class ServiceBusyError(ServiceError):
    """The queue is full; the same request may succeed later."""


class ServiceStoppedError(ServiceError):
    """The service is stopping or has stopped."""


class EngineFailedError(ServiceError):
    """The engine gave the request up."""


class Generation:
    """The outputs of the prompts of one `submit`, as they come; leaving the `async with` aborts what is open.

    Iterating gives (index, output) until all outputs have ended, with index = prompt * n + choice.

    Raises:
        EngineFailedError, ServiceStoppedError: while iterating, when the rest will not come.
    """

    def __init__(self, request_ids: Sequence[str], n: int, close: Callable[["Generation"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.n = n
        self._close = close
        self._num_open = len(self.request_ids) * n
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

    def fail(self, error: ServiceError) -> None:
        """End everything that is open with this error."""
        self.settle(error)
        self._arrived.put_nowait(error)


class EngineService:
    """Runs an engine for many clients of one event loop.

    Args:
        engine: nobody else may call it between `start` and the end of `stop`.
        max_queued_requests: outputs that may wait for their first token at the same time.
    """

    def __init__(self, engine: Engine, max_queued_requests: int = MAX_QUEUED_REQUESTS) -> None:
        self.model_name = engine.model_name
        self.max_context_tokens = engine.max_context_tokens
        self.tokenizer = engine.tokenizer
        self.sampling_defaults = engine.config.generation
        self.stats: EngineStats = engine.stats()  # as of the last iteration or command
        self.max_queued_requests = max_queued_requests
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False  # the thread's own
        self._thread_ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ordinals = itertools.count()
        self._generations: dict[str, Generation] = {}  # request_id -> whose it is
        self._queued: set[tuple[str, int]] = set()  # (request_id, choice) without a first token
        self._refusal: ServiceError | None = ServiceStoppedError("the service has not been started")

    async def start(self) -> None:
        """Start the engine thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._refusal = None
        self._thread.start()

    async def stop(self) -> None:
        """Tell everybody who waits, free what they hold and end the thread; a second call does nothing.

        An iteration cannot be interrupted: after `STOP_TIMEOUT_S` it is left to itself.
        """
        if self._loop is None or isinstance(self._refusal, ServiceStoppedError):
            return
        self._refuse_all(ServiceStoppedError("the server is shutting down"))
        self._inbox.put(None)
        try:
            await asyncio.wait_for(self._thread_ended.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the engine is still busy with an iteration; not waiting for it")

    @property
    def refusal(self) -> ServiceError | None:
        """Why new requests are refused at present; None when they are not."""
        return self._refusal

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
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        num_outputs = len(prompts) * params.n
        if num_outputs > self.max_queued_requests:
            raise ValueError(
                f"{num_outputs} outputs at once are more than the {self.max_queued_requests} that may wait: "
                "send fewer prompts per request or lower n"
            )
        if len(self._queued) + num_outputs > self.max_queued_requests:
            raise ServiceBusyError(
                f"{len(self._queued)} requests are waiting already, at most {self.max_queued_requests} may: "
                "try again later"
            )
        request_ids = [str(next(self._ordinals)) for _ in prompts]
        generation = Generation(request_ids, params.n, self._close)
        self._generations |= dict.fromkeys(request_ids, generation)
        self._queued |= _choices(generation)
        try:
            token_ids = [await self._encode(prompt, add_special_tokens) for prompt in prompts]
            self._inbox.put(partial(self._add, generation, token_ids, params))
            await generation.accepted()
        except BaseException:  # cancelled included
            generation.close()
            raise
        return generation

    async def _encode(self, prompt: Prompt, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
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
            if self._generations.pop(request_id, None) is not None:
                self._inbox.put(partial(self._abort, request_id))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:  # otherwise closed while the iteration ran
                self._queued.discard((output.request_id, output.choice))
                generation.put(output)

    def _refuse_all(self, reason: ServiceError) -> None:
        """End all generations, and every later one, for this reason."""
        self._refusal = reason
        for generation in set(self._generations.values()):
            generation.fail(reason)
            generation.close()

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
            self._post(self._refuse_all, EngineFailedError(reason))
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

    def _step(self) -> None:
        outputs = self._engine.step(before_next=self._run_commands)
        self.stats = self._engine.stats()
        if outputs:
            self._post(self._deliver, outputs)

    def _add(self, generation: Generation, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        error = None
        try:
            for request_id, token_ids in zip(generation.request_ids, prompts, strict=True):
                self._engine.add_request(request_id, token_ids, params)
        except Exception as refused:  # told to the caller, who aborts the prompts before this one
            error = refused
        self.stats = self._engine.stats()
        self._post(generation.settle, error)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self.stats = self._engine.stats()

    def _post(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        # The loop is closed when stop() did not wait for this iteration: nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _choices(generation: Generation) -> set[tuple[str, int]]:
    return set(itertools.product(generation.request_ids, range(generation.n)))
