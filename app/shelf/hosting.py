"""The model that the server answers with.

```
    no model ── load ──→ loading ─────→ loaded ── unload ──→ no model
        ↑                 │    ↑          │
        └── it failed, or ┘   │ │         │ idle for a while
            was stopped       │ └─ resting ┘
                              │     the next request, which waits
                              └── the engine's process ended by itself: a pause, and a few times only
```

Memory holds one model at a time: the old one goes before the next one comes, whether that succeeds or not.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from neo_desktop.app import errors
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.shelf.restarts import Restarts
from neo_desktop.app.words import EXPECTED, error_text
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.unused_memory import return_memory

logger = logging.getLogger(__name__)

Loader = Callable[[str, Progress], EngineService]  # by a model's name; called in a thread of its own

NO_MODEL = "no model is loaded: load one in the Models view, or start the server with --model"
STOP_TIMEOUT_S = 5.0  # the server's end waits for a model that is being loaded
SMALLEST_STEP = 0.01  # of progress that is worth telling


class ShelfError(RuntimeError):
    """A load or a download that cannot begin; the message says why."""


class LoadStoppedError(Exception):
    """Ends the loader: the model is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a load, or of a download."""

    name: str
    share: float  # done, 0 to 1
    what: str  # is being done
    reason: str | None = None  # cause of a restart; None: a person wants it


class ModelHost:
    """Holds the service of the loaded model; routes ask for it at each request, since it may change.

    Belongs to the event loop that `start` ran on.

    Args:
        service: of the model that is loaded first, not started yet; None: there is none.
        load: makes the service of a model; None: models cannot be changed.
        name: of `service`; without one, of a model to load right after the start.
        idle_unload_s: a model that is idle for this time gives its memory back, and is loaded
            again for the next request. None: never.
    """

    def __init__(
        self,
        service: EngineService | None = None,
        *,
        load: Loader | None = None,
        name: str | None = None,
        idle_unload_s: float | None = None,
    ) -> None:
        self.name = name if name is not None or service is None else service.model_name
        self.loading: Loading | None = None
        self.error: str | None = None  # error of the last load, or the obstacle to a restart
        self.is_resting = False  # the idle model gave its memory back
        self.listeners: list[Callable[[], object]] = []  # called on the loop when any of this changes
        self._service = service  # loaded, or resting
        self._load = load
        self._idle_unload_s = idle_unload_s
        self._is_gone = False  # the engine ended too often
        self._restarts = Restarts()
        self._is_stopped = threading.Event()  # set: the load that runs is not wanted any more
        self._changes = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None  # of the load that runs
        self._watch: asyncio.Task[None] | None = None

    @property
    def service(self) -> EngineService:
        """The service of the loaded model, or of a resting one; NoModelError."""
        loading = self.loading
        if self._service is not None:
            return self._service
        if loading is not None and loading.reason is not None:
            raise errors.EngineRestartingError(
                f"{loading.reason}. {loading.name} is being started again: try again in a moment"
            )
        if loading is not None:
            raise errors.ModelLoadingError(
                f"{loading.name} is being loaded ({loading.share:.0%}): try again in a moment"
            )
        if self._is_gone and self.error is not None:
            raise errors.EngineGoneError(self.error)
        raise errors.NoModelError(f"{self.error} ({NO_MODEL})" if self.error else NO_MODEL)

    async def ready(self) -> EngineService:
        """Return the service of the loaded model, for a request; a resting model is loaded first."""
        if self.is_resting:
            assert self.name is not None
            task = self._task or self.begin(self.name)
            await asyncio.shield(task)  # one caller may leave; the others still want the model
        return self.service

    @property
    def has_service(self) -> bool:
        return self._service is not None

    @property
    def has_weights(self) -> bool:
        """True if a model is in memory."""
        return self._service is not None and not self.is_resting

    async def start(self) -> None:
        """Start the service, or the first load, on the running event loop."""
        if self._service is not None:
            await self._take_over(self._service)
        elif self.name is not None:
            self.begin(self.name)
        if self._idle_unload_s is not None and self._load is not None:
            self._watch = asyncio.create_task(self._watch_idle(self._idle_unload_s))

    async def stop(self) -> None:
        """Answer waiting requests, end the service and free its memory; a second call does nothing."""
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._is_stopped.set()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if self._service is not None:
            await self._service.stop()
            if self._load is not None:  # otherwise the engine is its maker's
                await asyncio.to_thread(self._service.close)

    def begin(self, name: str) -> asyncio.Task[None]:
        """Begin to load a model in place of the loaded one; ShelfError."""
        if self._load is None:
            raise ShelfError("this server keeps the model that it was started with")
        if self.loading is not None:
            raise ShelfError(f"{self.loading.name} is being loaded: stop that, or wait for it")
        self._restarts.forget()
        return self._begin(Loading(name, 0.0, "Making room"), self._replace(name))

    async def unload(self) -> None:
        """Free the model's memory, or stop the load that runs; open requests end with an error."""
        if self._task is not None:
            self._is_stopped.set()
            await asyncio.shield(self._task)
        async with self._changes:
            await self._free("the model was unloaded")
        self.error, self._is_gone = None, False
        self._tell()

    async def rest(self) -> None:
        """Free the model's memory until the next request, unless a request waits for its answer."""
        async with self._changes:
            service = self._service
            if service is None or service.idle_since_s is None or self.is_resting or self._load is None:
                return
            self.is_resting = True
            await service.stop("the model was unloaded, since nobody used it: try again", timeout_s=None)
            await asyncio.to_thread(_release, service)
        self._tell()

    def _begin(self, loading: Loading, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.error, self._is_gone = None, False
        self.loading = loading
        self._is_stopped.clear()
        self._task = asyncio.create_task(self._run(loading.name, work))
        self._tell()
        return self._task

    async def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._changes:
                await work
        except LoadStoppedError:
            self.name = None
        except Exception as error:
            self.name = None
            self.error = f"{name} could not be loaded: {error_text(error)}"
            logger.warning("%s", self.error, exc_info=not isinstance(error, EXPECTED))
        finally:
            self.loading = self._task = None
        if self._service is None:
            await asyncio.to_thread(return_memory)  # memory of the failed load
        self._tell()

    async def _replace(self, name: str) -> None:
        is_wanted_back = self.is_resting and name == self.name
        await self._free("the model was unloaded to make room for another", keep=is_wanted_back)
        try:
            service = await self._loaded(name)
        finally:
            self._service, self.is_resting = None, False
        self.name = name
        await self._take_over(service)

    async def _loaded(self, name: str) -> EngineService:
        """Load in a thread that the program's end need not wait for; LoadStoppedError: it was stopped."""
        loop, is_stopped, load = asyncio.get_running_loop(), self._is_stopped, self._load
        done: Future[EngineService] = Future()
        assert load is not None

        def progress(share: float, what: str) -> None:
            if is_stopped.is_set():
                raise LoadStoppedError
            loop.call_soon_threadsafe(self._progressed, share, what)

        def run() -> None:
            done.set_running_or_notify_cancel()
            try:
                service = load(name, progress)
                if is_stopped.is_set():
                    service.close()
                    raise LoadStoppedError
                done.set_result(service)
            except Exception as error:
                # The frames of its traceback hold what was loaded.
                is_expected = isinstance(error, (LoadStoppedError, *EXPECTED))
                done.set_exception(error.with_traceback(None) if is_expected else error)

        threading.Thread(target=run, name="model loader", daemon=True).start()
        return await asyncio.wrap_future(done)

    async def _take_over(self, service: EngineService) -> None:
        """Answer with a service from now on; should its engine end, start it again."""
        await service.start()
        self._service = service
        if service.is_process and self._load is not None:
            service.supervisor = partial(self._engine_ended, service)

    def _engine_ended(self, service: EngineService, reason: str) -> str:
        """Begin to start an engine again; return the error for requests that wait."""
        if service is not self._service or self._task is not None:
            return reason  # another model has taken its place
        name, self._service = self.name or service.model_name, None
        self._restarts.ended(reason)
        if self._restarts.pause_s is None:
            told = self._restarts.verdict(name, service.stats.device)
        else:
            told = f"{reason}. It is being started again: send the request again"
            logger.warning("%s; it is started again", reason)
        self._begin(Loading(name, 0.0, "Waiting a moment", reason), self._start_again(name, service))
        return told

    async def _start_again(self, name: str, ended: EngineService) -> None:
        """Load a model until that succeeds, or too many engines have ended."""
        await ended.stop()
        await asyncio.to_thread(_release, ended)
        while (pause_s := self._restarts.pause_s) is not None:
            self._restarts.begun()
            self._restarts.be_careful(ended.stats.device)
            if await asyncio.to_thread(self._is_stopped.wait, pause_s):
                raise LoadStoppedError
            try:
                service = await self._loaded(name)
            except LoadStoppedError:
                raise
            except Exception as error:
                logger.warning("%s could not be started again: %s", name, error_text(error))
                self._restarts.failed(f"it could not be started again: {error_text(error)}")
            else:
                self._restarts.loaded()
                await self._take_over(service)
                return
        self.name, self._is_gone = None, True
        self.error = self._restarts.verdict(name, ended.stats.device)
        logger.error("%s", self.error)

    def _progressed(self, share: float, what: str) -> None:
        before = self.loading
        if before is None:
            return
        self.loading = now = replace(before, share=share, what=what)
        if now.what != before.what or now.share >= before.share + SMALLEST_STEP:
            self._tell()

    async def _free(self, reason: str, *, keep: bool = False) -> None:
        """Unload; `keep` the service itself, which has nothing left but its name, to be asked meanwhile."""
        service = self._service
        if service is None:
            return
        if not keep:
            self._service, self.is_resting, self.name = None, False, None
        await service.stop(reason, timeout_s=None)
        await asyncio.to_thread(_release, service)

    async def _watch_idle(self, idle_s: float) -> None:
        while True:
            since_s = self._service.idle_since_s if self._service is not None and self.has_weights else None
            now_s = time.monotonic()
            due_s = (now_s if since_s is None else since_s) + idle_s  # a busy model's time begins now
            if due_s <= now_s:
                await self.rest()
            else:
                await asyncio.sleep(due_s - now_s)

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()


def _release(service: EngineService) -> None:
    service.close()
    return_memory()
