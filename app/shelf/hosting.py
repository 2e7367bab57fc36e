"""Which model the server answers with: none, or one, and another one later.

    no model ── load ──→ loading ─────→ loaded ── unload ──→ no model
        ↑                 │    ↑          │
        └── it failed, or ┘    │          │ nobody asked it anything for a while
            was stopped        └─ resting ┘
                        the next request, which waits

Memory holds one model at a time: the old one goes before the next one comes, whether that succeeds or not.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from neo_desktop.app.service import EngineService, ServiceError, ServiceStoppedError

logger = logging.getLogger(__name__)

LoadProgress = Callable[[float, str], None]  # share done, 0 to 1, and what is being done
Loader = Callable[[str, LoadProgress], EngineService]  # by a model's name; called in a thread of its own

NO_MODEL = "no model is loaded: load one on the page, or start the server with --model"
STOP_TIMEOUT_S = 5.0  # how long the end of the server waits for a model that is being loaded
SMALLEST_STEP = 0.01  # of progress that is worth telling


class NoModelError(ServiceError):
    """No model is loaded at present."""

    code = "no_model"


class ModelLoadingError(NoModelError):
    """A model is being loaded; the same request may succeed later."""

    code = "model_loading"


class HostBusyError(ServiceError):
    """Another model is being loaded."""

    code = "model_loading"


class LoadFailedError(ServiceError):
    """A model could not be loaded; the message says why."""

    code = "load_failed"


class _LoadStoppedError(Exception):
    """Ends the loader's thread."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a model is."""

    name: str
    share: float  # done, 0 to 1
    what: str  # is being done


class ModelHost:
    """Holds the service of the loaded model; routes ask for it at each request, since it may change.

    Belongs to the event loop that `start` ran on.

    Args:
        service: of the model that is loaded first, not started yet; None: there is none.
        load: makes the service of a model; None: models cannot be changed.
        name: of `service`; without one, of a model to load right after the start.
        idle_unload_s: a model that nobody asked anything for so long gives its memory back, and is loaded
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
        self.error: str | None = None  # why the last load failed
        self.listeners: list[Callable[[], object]] = []  # called on the loop when any of this changes
        self._service = service  # loaded, or resting
        self._is_resting = False
        self._load = load
        self._idle_unload_s = idle_unload_s
        self._is_stopped = threading.Event()  # set: the load that runs is not wanted any more
        self._changes = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None  # of the load that runs
        self._watch: asyncio.Task[None] | None = None

    @property
    def service(self) -> EngineService:
        """The service of the loaded model; of one that rests, too: a request brings that back.

        Raises:
            NoModelError: there is none.
        """
        if self._service is not None:
            return self._service
        if self.loading is not None:
            percent = f"{self.loading.share:.0%}"
            raise ModelLoadingError(f"{self.loading.name} is being loaded ({percent}): try again in a moment")
        raise NoModelError(f"{self.error} ({NO_MODEL})" if self.error else NO_MODEL)

    @property
    def is_resting(self) -> bool:
        """Whether the model gave its memory back because nobody used it."""
        return self._is_resting

    @property
    def has_service(self) -> bool:
        """Whether `service` is there."""
        return self._service is not None

    @property
    def has_weights(self) -> bool:
        """Whether a model is in memory."""
        return self._service is not None and not self._is_resting

    @property
    def can_load(self) -> bool:
        """Whether models can be changed."""
        return self._load is not None

    async def start(self) -> None:
        """Start the service, or the first load, on the running event loop."""
        if self._service is not None:
            await self._service.start()
        elif self.name is not None:
            self.begin(self.name)
        if self._idle_unload_s is not None and self._load is not None:
            self._watch = asyncio.create_task(self._watch_idle(self._idle_unload_s))

    async def stop(self) -> None:
        """Tell everybody who waits, end the service and free its memory; a second call does nothing."""
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
        """Begin to load a model in place of the loaded one; `loading` and `error` tell what becomes of it.

        Raises:
            HostBusyError: another one is being loaded.
            LoadFailedError: this server cannot load models.
        """
        if self._load is None:
            raise LoadFailedError("this server keeps the model that it was started with")
        if self._task is not None:
            assert self.loading is not None
            raise HostBusyError(f"{self.loading.name} is being loaded: stop that, or wait for it")
        self.error = None
        self.loading = Loading(name, 0.0, "Making room")
        self._is_stopped.clear()
        self._task = asyncio.create_task(self._replace(name, self._load))
        self._tell()
        return self._task

    async def unload(self) -> None:
        """Free the model's memory, or stop the load that runs; requests that are open are told."""
        if self._task is not None:
            self._is_stopped.set()
            await asyncio.shield(self._task)
        async with self._changes:
            await self._free("the model was unloaded")
        self.error = None
        self._tell()

    async def _wake(self, model_name: str) -> EngineService:
        """Bring back the model that rests, and return its service."""
        if self._is_resting and self._task is None:
            assert self.name is not None
            self.begin(self.name)
        if self._task is not None:
            # Whoever asked may leave; the others still want the model.
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
                await service.start()
                self._service, self.name = service, name
        except _LoadStoppedError:
            self.name = None
        except Exception as error:
            self.name = None
            self.error = f"{name} could not be loaded: {_sentence(error)}"
            logger.warning("%s", self.error, exc_info=not _is_expected(error))
        finally:
            self.loading = self._task = None
        if self._service is None:
            await asyncio.to_thread(_return_memory)  # what a load that failed had taken
        self._tell()

    async def _run_loader(self, name: str, load: Loader) -> EngineService:
        """Load in a thread that the program's end need not wait for."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[EngineService] = loop.create_future()

        def progress(share: float, what: str) -> None:
            if self._is_stopped.is_set():
                raise _LoadStoppedError
            loop.call_soon_threadsafe(self._progressed, Loading(name, share, what))

        def run() -> None:
            finish: Callable[[], None]
            try:
                service = load(name, progress)
                if self._is_stopped.is_set():
                    service.close()
                    raise _LoadStoppedError
                finish = partial(done.set_result, service)
            except Exception as error:
                # The frames of its traceback hold what was loaded.
                known = error.with_traceback(None) if _is_expected(error) else error
                finish = partial(done.set_exception, known)
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(finish)

        threading.Thread(target=run, name="model loader", daemon=True).start()
        return await done

    def _progressed(self, now: Loading) -> None:
        before = self.loading
        if before is None:
            return
        self.loading = now
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
        await asyncio.to_thread(_release, service)

    async def _watch_idle(self, idle_s: float) -> None:
        while True:
            since_s = None
            if self._service is not None and not self._is_resting:
                since_s = self._service.idle_since_s
            now_s = time.monotonic()
            due_s = (
                now_s if since_s is None else since_s
            ) + idle_s  # not before: who is busy now, is until now
            if due_s <= now_s:
                await self.rest()
            else:
                await asyncio.sleep(due_s - now_s)

    async def rest(self) -> None:
        """Free the model's memory until the next request, unless somebody waits for an answer."""
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
            await asyncio.to_thread(_release, service)
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()


def _release(service: EngineService) -> None:
    service.close()
    _return_memory()


def _return_memory() -> None:
    """Return what nobody refers to any more to the system, on the GPU too."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU was used
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def _is_expected(error: Exception) -> bool:
    """Whether its message was written for people."""
    return isinstance(error, _LoadStoppedError | ValueError | MemoryError | OSError | RuntimeError)


def _sentence(error: Exception) -> str:
    return str(error) if _is_expected(error) and str(error) else f"{type(error).__name__}: {error}"
