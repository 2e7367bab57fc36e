"""The way from the event loop to an engine and back.

    event loop                          engine: a thread, or a process of its own (app/engines)
    ──────────                          ──────
    submit() checks, tokenises, hashes.
               ── commands ──────────→  carried out before an iteration is planned.
    Generation ←─ one wake-up per step ── outputs, and the engine's figures

Everything here, the generations included, belongs to the event loop; events are brought to it by an `Outbox`.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from neo_desktop.app import errors
from neo_desktop.app.engines import messages as msg
from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.loop import EngineThread
from neo_desktop.app.engines.metrics import ServiceMetrics
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.templates.chat_templates import ChatTemplates
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.input_processor import Prompt
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
from neo_desktop.engine.stats import EngineStats
from neo_desktop.models.vision.prompt import SeenImage

logger = logging.getLogger(__name__)

SHORT_PROMPTS = 2000  # characters or token ids of a request's prompts
STOP_TIMEOUT_S = 5.0  # how long stop() waits for the iteration that runs
CALLS_PER_TURN = 16  # of the event loop, from the engine's thread
TICKS = 10  # in a timeout: a program that was halted for hours has missed one tick, not all
MAX_SEEN_BYTES = 256 << 20  # of images

Call = Callable[[], object]
EngineLink = EngineThread | EngineProcess
Supervisor = Callable[[str], str]  # an incident → the message for waiting clients


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


class EngineService:
    """Runs an engine for many clients of one event loop.

    The engine is the service's alone from `start` to the end of `stop`. A request may take
    `request_timeout_s` from its arrival to its last token; None: any time.
    """

    max_queued_requests = 1024  # outputs that may wait for their first token at the same time

    def __init__(self, engine: Engine | EngineLink, request_timeout_s: float | None = None) -> None:
        self._link: EngineLink = EngineThread(engine) if isinstance(engine, Engine) else engine
        self.is_process = self._link.is_process
        facts = self._link.facts
        self.model_name = facts.model_name
        self.note = facts.note
        self.max_context_tokens = facts.input_processor.max_context_tokens
        self.tokenizer = facts.input_processor.tokenizer
        self._input_processor = facts.input_processor
        self.sampling_defaults = facts.sampling_defaults
        self.blindness = facts.blindness  # the sentence that refuses images; empty: the model reads them
        self._seen: OrderedDict[bytes, SeenImage] = OrderedDict()  # the images used last, by their files
        self.templates = ChatTemplates(self.tokenizer)
        self.stats: EngineStats = facts.stats  # as of the last iteration or command
        self.metrics = ServiceMetrics()
        self.supervisor: Supervisor | None = None  # asked when the engine ends by itself
        self._request_timeout_s = request_timeout_s
        self._engine_ended = asyncio.Event()
        self._outbox: Outbox | None = None  # None: not started
        self._ordinals = itertools.count()
        self._generations: dict[str, Generation] = {}  # request_id -> whose it is
        self._queued: set[tuple[str, int]] = set()  # outputs without a first token, see `Generation.choices`
        self._asked: dict[int, asyncio.Future[Any]] = {}  # ticket -> who waits for the engine's answer
        self._num_heard = 0  # events of the engine's so far
        self._watch: asyncio.Task[None] | None = None
        # Why new requests are refused at present.
        self.refusal: errors.ServiceError | None = errors.ServiceStoppedError(
            "the service has not been started"
        )
        self.idle_since_s: float | None = time.monotonic()  # None: a request is open

    async def start(self) -> None:
        self._outbox = Outbox(asyncio.get_running_loop())
        await self.templates.start()
        self.refusal = None
        self._link.start(self._receive)
        if self._link.timeout_s is not None:
            self._watch = asyncio.create_task(self._end_if_hung(self._link.timeout_s))

    async def stop(
        self, reason: str = "the server is shutting down", *, timeout_s: float | None = STOP_TIMEOUT_S
    ) -> None:
        """End all requests with a reason, free what they hold and end the engine; a second call does nothing.

        Args:
            timeout_s: an iteration cannot be interrupted: after this time it is left to itself. None: never,
                unless the engine has a process of its own, which `close` ends all the same.
        """
        if self._outbox is None or isinstance(self.refusal, errors.ServiceStoppedError):
            return
        if timeout_s is None and self.is_process:
            timeout_s = STOP_TIMEOUT_S
        self._refuse_all(errors.ServiceStoppedError(reason))
        self._link.send(msg.Stop())
        await self.templates.stop()
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
    def num_queued(self) -> int:
        """Outputs that wait for their first token."""
        return len(self._queued)

    async def live_view(self) -> LiveView:
        """Ask the engine what it does right now; it answers between two iterations. ServiceError."""
        view: LiveView = await self._ask(msg.Look)
        return view

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        cuts_max_tokens: bool = False,
    ) -> Generation:
        """Check prompts, texts or token ids, and send them to the engine; see `InputProcessor.prepare`.

        Raises:
            ServiceError: the service takes no requests any more, or too many are waiting.
            ContextLengthError, SettingError, ValueError: a prompt or a setting cannot be used; none is run.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        num_outputs, most = len(prompts) * params.n, self.max_queued_requests
        if num_outputs > most:
            raise ValueError(
                f"{num_outputs} outputs at once are more than the {most} that may wait: "
                "send fewer prompts per request or lower n"
            )
        if self.num_queued + num_outputs > most:
            message = f"{self.num_queued} requests are waiting already, at most {most} may: try again later"
            raise errors.ServiceError(message, "queue_full")
        request_ids = [str(next(self._ordinals)) for _ in prompts]
        generation = Generation(request_ids, params.n, self._close)
        if self._request_timeout_s is not None:
            generation.limit_time(self._request_timeout_s)
        self._generations |= dict.fromkeys(request_ids, generation)
        self._queued |= generation.choices
        self.idle_since_s = None
        try:
            prepare = partial(
                self._input_processor.prepare,
                params=params,
                add_special_tokens=add_special_tokens,
                cuts_max_tokens=cuts_max_tokens,
            )
            if sum(map(len, prompts)) <= SHORT_PROMPTS:  # takes less than the way to a thread and back
                prepared = list(map(prepare, prompts))
            else:
                prepared = await asyncio.to_thread(lambda: list(map(prepare, prompts)))
            generation.prompt_token_ids = [each.token_ids for each in prepared]
            if params.grammar is not None:  # so that the engine finds it ready
                await self._ask(msg.Compile, params.grammar)
            if generation.failure is not None:  # it took too long
                raise generation.failure.with_traceback(None)
            self._send(msg.Add(request_ids, prepared))
        except BaseException:  # cancelled included
            generation.close()
            raise
        return generation

    async def compile(self, grammar: str) -> None:
        """Let the engine make a grammar ready. SettingError: it cannot be used; ServiceError."""
        await self._ask(msg.Compile, grammar)

    async def see(self, data: bytes) -> SeenImage:
        """Let the model read an image file, once for all turns of a chat; errors as of `submit`."""
        key = blake2b(data, digest_size=32).digest()
        if key not in self._seen:
            image = await self._ask(msg.See, data)
            self._seen.setdefault(key, image)  # another request may have asked meanwhile
        self._seen.move_to_end(key)
        found = self._seen[key]
        while len(self._seen) > 1 and sum(image.nbytes for image in self._seen.values()) > MAX_SEEN_BYTES:
            self._seen.popitem(last=False)
        return found

    async def embed(self, prompts: Sequence[Prompt], pooling: Pooling) -> list[tuple[list[float], int]]:
        """Return each prompt's embedding, of length 1, and its number of tokens; errors as of `submit`."""
        async with await self.submit(prompts, SamplingParams(pooling=pooling)) as generation:
            found = {
                index: (output.embedding.tolist(), output.num_prompt_tokens)
                async for index, output in generation
                if output.embedding is not None
            }
        return [found[index] for index in range(len(prompts))]

    def _close(self, generation: Generation) -> None:
        self._queued -= generation.choices
        for request_id in generation.request_ids:
            if self._generations.pop(request_id, None) is not None:
                self._link.send(msg.Abort(request_id))
        if not self._generations:
            self.idle_since_s = time.monotonic()

    def _send(self, command: msg.Command) -> None:
        """Send a command, unless the engine has ended: that is raised."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        self._link.send(command)

    async def _ask(self, command: type[msg.Compile | msg.See | msg.Look], *what: Any) -> Any:
        """Send a command and wait for its answer; that the engine ends meanwhile is raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ticket = next(self._ordinals)
        self._send(command(ticket, *what))
        self._asked[ticket] = answer
        return await answer

    def _answer(self, answer: msg.Answered) -> None:
        self._num_heard += 1
        asked = self._asked.pop(answer.ticket, None)
        if asked is None or asked.done():  # the caller has gone
            return
        if answer.error is None:
            asked.set_result(answer.value)
        else:
            asked.set_exception(answer.error)

    def _book(self, event: msg.Gained) -> None:
        self._num_heard += 1
        self.stats = event.stats
        if event.seconds is not None:
            self.metrics.iteration_s.observe(event.seconds)

    def _deliver(self, output: RequestOutput) -> None:
        generation = self._generations.get(output.request_id)
        if generation is not None:  # otherwise closed while the iteration ran
            self._queued.discard((output.request_id, output.choice))
            self.metrics.gained(generation, output)
            generation.put(output)

    def _refuse_all(self, reason: errors.ServiceError) -> None:
        """End all generations, and every later one, for this reason."""
        self.refusal = reason
        for generation in set(self._generations.values()):
            generation.fail(reason)
            generation.close()
        while self._asked:
            _, asked = self._asked.popitem()
            if not asked.done():
                asked.set_exception(reason)

    def _end(self, reason: str | None) -> None:
        self._engine_ended.set()
        if reason is None or isinstance(self.refusal, errors.ServiceStoppedError):
            return
        if self._watch is not None:
            self._watch.cancel()
        if self.supervisor is None:
            self._refuse_all(errors.EngineFailedError(f"{reason}: restart the server"))
        else:
            self._refuse_all(errors.EngineRestartingError(self.supervisor(reason)))

    async def _end_if_hung(self, timeout_s: float) -> None:
        """Kill an engine that has work, and says nothing for too long."""
        before, num_silent = -1, 0
        while num_silent < TICKS:
            await asyncio.sleep(timeout_s / TICKS)
            has_work = bool(self._asked) or self.stats.num_running + self.stats.num_waiting > 0
            num_silent = num_silent + 1 if has_work and self._num_heard == before else 0
            before = self._num_heard
        self._link.kill(f"the engine had work and made no progress for {timeout_s:g} s, so it was ended")

    # From here on: a thread of the engine's.

    def _receive(self, events: Sequence[msg.Event]) -> None:
        assert self._outbox is not None
        self._outbox.put(call for event in events for call in self._calls(event))

    def _calls(self, event: msg.Event) -> Iterator[Call]:
        match event:
            case msg.Gained():
                yield partial(self._book, event)
                for output in event.outputs:
                    yield partial(self._deliver, output)
            case msg.Answered():
                yield partial(self._answer, event)
            case msg.Ended():
                yield partial(self._end, event.reason)
