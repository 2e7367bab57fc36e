"""The models on this computer: facts and predictions, loads and downloads."""

import asyncio
import logging
import threading

from neo_desktop.app.news import MODELS, News
from neo_desktop.app.shelf.catalogue import UnknownModelError
from neo_desktop.app.shelf.hosting import SMALLEST_STEP, Loading, ModelHost, ShelfError
from neo_desktop.app.shelf.hub_files import PullError, PullStoppedError
from neo_desktop.app.shelf.model_loader import Candidate, ModelLoader
from neo_desktop.app.shelf.pull import check_name, pull
from neo_desktop.engine.loading import BUILTIN_NAME

logger = logging.getLogger(__name__)


class ModelShelf:
    """The models on this computer, and the downloads. The loaded model and loads are the host's.

    Without a loader nothing can be chosen. `news` wakes those who follow `MODELS`.
    """

    def __init__(self, host: ModelHost, loader: ModelLoader | None, news: News) -> None:
        self.host = host
        self.models: list[Candidate] = []  # as last looked at
        self.pulling: Loading | None = None
        self.pull_error: str | None = None
        self.folders = [] if loader is None else loader.catalogue.folders
        self._loader = loader
        self._news = news
        self._pull_task: asyncio.Task[None] | None = None
        self._pull_stopped = threading.Event()
        self._looking: set[asyncio.Task[None]] = set()
        host.listeners.append(self._host_changed)

    @property
    def has_offer(self) -> bool:
        """True if only the built-in model can be run: the packaged one is offered."""
        has_model = any(each.reason is None and each.model.name != BUILTIN_NAME for each in self.models)
        return self._loader is not None and bool(self.models) and not has_model

    async def look(self) -> None:
        loader, is_loaded = self._loader, self.host.has_weights
        if loader is not None:
            self.models = await asyncio.to_thread(
                lambda: [loader.candidate(one, is_loaded=is_loaded) for one in loader.catalogue.models()]
            )
            self._news.tell(MODELS)

    async def load(self, name: str) -> None:
        """Begin to load a model; ShelfError says why it cannot be."""
        loader = self._loader
        if loader is None:
            raise ShelfError("this server keeps the model that it was started with")
        try:
            model = await asyncio.to_thread(loader.catalogue.get, name)
        except UnknownModelError as error:
            raise ShelfError(str(error)) from None
        # Check first: a load that fails would cost the loaded model.
        candidate = await asyncio.to_thread(loader.candidate, model, is_loaded=self.host.has_weights)
        if reason := candidate.refusal or await asyncio.to_thread(loader.why_not, model):
            raise ShelfError(f"{name} cannot be loaded: {reason}")
        self.host.begin(model.name)

    def start_pull(self, name: str, *, load: bool = False) -> None:
        """Begin a download, and load the model once it is here; ShelfError."""
        try:
            check_name(name)
        except PullError as error:
            raise ShelfError(str(error)) from None
        if self.pulling is not None:
            raise ShelfError(f"{self.pulling.name} is being downloaded: stop that, or wait for it")
        self._pull_stopped.clear()
        self.pull_error = None
        self.pulling = Loading(name, 0.0, "Starting")
        self._pull_task = asyncio.create_task(self._pull(name, load))
        self._news.tell(MODELS)

    async def close(self) -> None:
        """Let a download end soon; what has arrived is kept."""
        self._pull_stopped.set()

    async def stop_pull(self) -> None:
        self._pull_stopped.set()
        if self._pull_task is not None:
            await asyncio.wait([self._pull_task], timeout=5)

    async def _pull(self, name: str, load: bool) -> None:
        loop = asyncio.get_running_loop()

        def arrived(share: float, what: str) -> None:
            loop.call_soon_threadsafe(self._pulled, Loading(name, share, what))

        try:
            await asyncio.to_thread(pull, name, arrived, self._pull_stopped)
            if load:
                await self.load(name)
        except PullStoppedError:
            pass
        except (PullError, ShelfError) as error:
            self.pull_error = str(error)
        except Exception as error:
            logger.exception("a download failed")
            self.pull_error = f"{name} could not be downloaded: {type(error).__name__}: {error}"
        self.pulling = self._pull_task = None
        await self.look()

    def _pulled(self, now: Loading) -> None:
        before = self.pulling
        if before is not None:
            self.pulling = now
            if now.what != before.what or now.share >= before.share + SMALLEST_STEP:
                self._news.tell(MODELS)

    def _host_changed(self) -> None:
        self._news.tell(MODELS)
        if self.host.loading is None:  # memory has changed, and so has what fits
            task = asyncio.get_running_loop().create_task(self.look())
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)
