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
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import (
    EngineGoneError,
    EngineRestartingError,
    HostBusyError,
    LoadFailedError,
    ModelLoadingError,
    NoModelError,
    ServiceStoppedError,
)
from neo_desktop.app.shelf.load_thread import (
    Loader,
    LoadStoppedError,
    is_expected,
    load_in_thread,
    release,
)
from neo_desktop.app.shelf.restarts import Restarts
from neo_desktop.app.words import error_text
from neo_desktop.engine.unused_memory import return_memory

logger = logging.getLogger(__name__)


NO_MODEL = "no model is loaded: load one on the page, or start the server with --model"
STOP_TIMEOUT_S = 5.0  # how long the end of the server waits for a model that is being loaded
SMALLEST_STEP = 0.01  # of progress that is worth telling


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a load."""

    name: str
    share: float  # done, 0 to 1
    what: str  # is being done
    reason: str | None = None  # why it is started again; None: a person wants it


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
        self.error: str | None = None  # why the last load failed, or why the engine is not started again
        self.listeners: list[Callable[[], object]] = []  # called on the loop when any of this changes
        self._service = service  # loaded, or resting
        self._is_resting = False
        self._load = load
        self._idle_unload_s = idle_unload_s
        self._is_gone = False  # the engine ended too often
        self._restarts = Restarts()
        self._is_stopped = threading.Event()  # set: the load that runs is not wanted any more
        self._pause: asyncio.Event | None = None  # before a start; set: it is not wanted any more
        self._changes = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None  # of the load that runs
        self._watch: asyncio.Task[None] | None = None

    @property
    def service(self) -> EngineService:
        """The service of the loaded model; also of a resting model, which a request brings back.

        Raises:
            NoModelError: there is none.
        """
        if self._service is not None:
            return self._service
        if self.loading is not None and self.loading.reason is not None:
            raise EngineRestartingError(
                f"{self.loading.reason}. {self.loading.name} is being started again: try again in a moment"
            )
        if self.loading is not None:
            percent = f"{self.loading.share:.0%}"
            raise ModelLoadingError(f"{self.loading.name} is being loaded ({percent}): try again in a moment")
        if self._is_gone and self.error is not None:
            raise EngineGoneError(self.error)
        raise NoModelError(f"{self.error} ({NO_MODEL})" if self.error else NO_MODEL)

    @property
    def is_resting(self) -> bool:
        """True if the idle model gave its memory back."""
        return self._is_resting

    @property
    def has_service(self) -> bool:
        """True if `service` returns one."""
        return self._service is not None

    @property
    def has_weights(self) -> bool:
        """True if a model is in memory."""
        return self._service is not None and not self._is_resting

    @property
    def can_load(self) -> bool:
        """True if models can be changed."""
        return self._load is not None

    async def start(self) -> None:
        """Start the service, or the first load, on the running event loop."""
        if self._service is not None:
            await self._service.start()
            self._adopt(self._service)
        elif self.name is not None:
            self.begin(self.name)
        if self._idle_unload_s is not None and self._load is not None:
            self._watch = asyncio.create_task(self._watch_idle(self._idle_unload_s))

    async def stop(self) -> None:
        """Answer waiting requests, end the service and free its memory; a second call does nothing."""
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._stop_load()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if self._service is not None:
            await self._service.stop()
            if self._load is not None:  # otherwise the engine is its maker's
                await asyncio.to_thread(self._service.close)

    def begin(self, name: str) -> asyncio.Task[None]:
        """Begin to load a model in place of the loaded one; `loading` and `error` show the progress.

        Raises:
            HostBusyError: another one is being loaded.
            LoadFailedError: this server cannot load models.
        """
        if self._load is None:
            raise LoadFailedError("this server keeps the model that it was started with")
        if self._task is not None:
            assert self.loading is not None
            raise HostBusyError(f"{self.loading.name} is being loaded: stop that, or wait for it")
        self._restarts.forget()
        return self._begin(Loading(name, 0.0, "Making room"), self._replace(name, self._load))

    def _begin(self, loading: Loading, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.error, self._is_gone = None, False
        self.loading = loading
        self._is_stopped.clear()
        self._task = asyncio.create_task(work)
        self._tell()
        return self._task

    def _stop_load(self) -> None:
        self._is_stopped.set()
        if self._pause is not None:
            self._pause.set()

    async def unload(self) -> None:
        """Free the model's memory, or stop the load that runs; open requests end with an error."""
        if self._task is not None:
            self._stop_load()
            await asyncio.shield(self._task)
        async with self._changes:
            await self._free("the model was unloaded")
        self.error, self._is_gone = None, False
        self._tell()

    async def _wake(self, model_name: str) -> EngineService:
        """Bring back the model that rests, and return its service."""
        if self._is_resting and self._task is None:
            assert self.name is not None
            self.begin(self.name)
        if self._task is not None:
            # One caller may leave; the others still want the model.
            await asyncio.shield(self._task)
        service = self.service
        if service.model_name != model_name:
            raise ServiceStoppedError(f"{model_name} was unloaded to make room for another model")
        return service

    async def _replace(self, name: str, load: Loader) -> None:
        try:
            async with self._changes:
                is_wanted_back = self._is_resting and name == self.name
                await self._free("the model was unloaded to make room for another", keep=is_wanted_back)
                try:
                    service = await self._run_loader(name, load)
                finally:
                    self._service, self._is_resting = None, False
                await self._take_over(name, service)
        except LoadStoppedError:
            self.name = None
        except Exception as error:
            self.name = None
            self.error = f"{name} could not be loaded: {error_text(error)}"
            logger.warning("%s", self.error, exc_info=not is_expected(error))
        finally:
            self.loading = self._task = None
        if self._service is None:
            await asyncio.to_thread(return_memory)  # what a load that failed had taken
        self._tell()

    async def _take_over(self, name: str, service: EngineService) -> None:
        """Answer with a service from now on."""
        await service.start()
        self._service, self.name = service, name
        self._adopt(service)

    def _adopt(self, service: EngineService) -> None:
        """Start its engine again, should it end."""
        if service.is_process and self._load is not None:
            service.supervisor = partial(self._engine_ended, service, self._load)

    def _engine_ended(self, service: EngineService, load: Loader, reason: str) -> str:
        """Begin to start an engine again; return the error for requests that wait."""
        if service is not self._service or self._task is not None:
            return reason  # another model has taken its place
        name, self._service = self.name or service.model_name, None
        self._restarts.ended(reason, service.stats.backend)
        loading = Loading(name, 0.0, "Waiting a moment", reason)
        if self._restarts.pause_s is None:
            told = self._restarts.verdict(name, service.stats.device)
        else:
            told = f"{reason}. It is being started again: send the request again"
            logger.warning("%s; it is started again", reason)
        self._begin(loading, self._start_again(loading, load, service))
        return told

    async def _start_again(self, loading: Loading, load: Loader, ended: EngineService) -> None:
        """Load a model until that succeeds, or too many engines have ended."""
        name, service = loading.name, None
        try:
            async with self._changes:
                await ended.stop()
                await asyncio.to_thread(release, ended)
                while service is None and (pause_s := self._restarts.pause_s) is not None:
                    self._restarts.begun()
                    self._restarts.be_careful(ended.stats.device)
                    await self._wait(pause_s)
                    try:
                        service = await self._run_loader(name, load)
                    except Exception as error:
                        if isinstance(error, LoadStoppedError):
                            raise
                        logger.warning("%s could not be started again: %s", name, error_text(error))
                        self._restarts.failed(f"it could not be started again: {error_text(error)}")
                if service is not None:
                    self._restarts.loaded()
                    await self._take_over(name, service)
                else:
                    self.name, self._is_gone = None, True
                    self.error = self._restarts.verdict(name, ended.stats.device)
                    logger.error("%s", self.error)
        except LoadStoppedError:
            self.name = None
        finally:
            self.loading = self._task = None
        self._tell()

    async def _wait(self, seconds: float) -> None:
        """Let some time pass, unless the model is not wanted any more."""
        self._pause = asyncio.Event()
        if self._is_stopped.is_set():
            raise LoadStoppedError
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pause.wait(), seconds)
            raise LoadStoppedError

    async def _run_loader(self, name: str, load: Loader) -> EngineService:
        return await load_in_thread(name, load, self._progressed, self._is_stopped)

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
            self._service, self._is_resting, self.name = None, False, None
        await service.stop(reason, timeout_s=None)
        await asyncio.to_thread(release, service)

    async def _watch_idle(self, idle_s: float) -> None:
        while True:
            since_s = None
            if self._service is not None and not self._is_resting:
                since_s = self._service.idle_since_s
            now_s = time.monotonic()
            due_s = (now_s if since_s is None else since_s) + idle_s  # a busy model's time begins now
            if due_s <= now_s:
                await self.rest()
            else:
                await asyncio.sleep(due_s - now_s)

    async def rest(self) -> None:
        """Free the model's memory until the next request, unless a request waits for its answer."""
        async with self._changes:
            service = self._service
            if service is None or service.idle_since_s is None or self._is_resting or self._load is None:
                return
            self._is_resting = True
            await service.stop(
                "the model was unloaded, since nobody used it: try again",
                timeout_s=None,
                successor=partial(self._wake, service.model_name),
            )
            await asyncio.to_thread(release, service)
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()
