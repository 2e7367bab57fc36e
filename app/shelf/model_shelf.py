"""The models on this computer: their view, loads and downloads."""

import asyncio
import logging
import threading
from dataclasses import asdict
from typing import Any

from neo_desktop.app.errors import HostBusyError, LoadFailedError
from neo_desktop.app.news import MODELS, News
from neo_desktop.app.shelf import packaged_model
from neo_desktop.app.shelf.catalogue import LocalModel, UnknownModelError, own_folder
from neo_desktop.app.shelf.fits import Fit
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.pull import check_name, pull
from neo_desktop.app.shelf.pull_errors import PullError, PullStoppedError
from neo_desktop.engine.loading import BUILTIN_NAME
from neo_desktop.engine.stats import LLAMACPP, NEO

logger = logging.getLogger(__name__)


class ShelfError(RuntimeError):
    """A load or a download that cannot begin; the message says why."""


class ModelShelf:
    """The models on this computer, the loaded one among them, and the progress of loads and downloads.

    Args:
        host: that loads them.
        loader: the host's; None: it has none, and nothing can be chosen.
        news: wakes those who follow `MODELS`.
    """

    def __init__(self, host: ModelHost, loader: ModelLoader | None, news: News) -> None:
        self._host = host
        self._loader = loader
        self._news = news
        self._models: list[dict[str, Any]] = []  # as last looked at
        self._pulling: dict[str, Any] | None = None
        self._pull_error: str | None = None
        self._pull_task: asyncio.Task[None] | None = None
        self._pull_stopped = threading.Event()
        self._looking: set[asyncio.Task[Any]] = set()
        host.listeners.append(self._host_changed)

    def view(self) -> dict[str, Any]:
        """Return a ModelsView, with the models as they were last looked at."""
        host = self._host
        return {
            "loaded": self._loaded(),
            "loading": None if host.loading is None else asdict(host.loading),
            "error": host.error,
            "models": self._models,
            "folders": [str(folder) for folder in self._loader.catalogue.folders] if self._loader else [],
            "can_pull": self._loader is not None,
            "pulling": self._pulling,
            "pull_error": self._pull_error,
            "offer": self._offer(),
        }

    async def fresh_view(self) -> dict[str, Any]:
        """Look at all folders, and return a ModelsView."""
        if self._loader is not None:
            self._models = await asyncio.to_thread(_look, self._loader, self._host.has_weights)
            self._publish()
        return self.view()

    async def close(self) -> None:
        """Stop a download; what has arrived is kept."""
        self._pull_stopped.set()

    async def unload(self) -> None:
        """Give the loaded model's memory back, or stop loading one."""
        await self._host.unload()

    async def stop_pull(self) -> None:
        """Stop the download; what has arrived is kept."""
        self._pull_stopped.set()
        if self._pull_task is not None:
            await asyncio.wait([self._pull_task], timeout=5)

    def _offer(self) -> dict[str, Any] | None:
        """A real model to begin with, where there is none yet."""
        if self._loader is None or any(
            each["runnable"] and each["name"] != BUILTIN_NAME for each in self._models
        ):
            return None
        return {
            "name": packaged_model.NAME,
            "title": packaged_model.TITLE,
            "size_bytes": packaged_model.PACKAGE_BYTES,
            "licence": packaged_model.LICENCE,
        }

    def _loaded(self) -> dict[str, Any] | None:
        if not self._host.has_service:
            return None
        stats = self._host.service.stats
        tokens = {place: pool.num_blocks * stats.block_size for place, pool in stats.pools.items()}
        return {
            "name": self._host.name,
            "is_resting": self._host.is_resting,
            "dtype": stats.dtype,
            "device": stats.device,
            "policy": stats.policy,
            "context_tokens": stats.max_context_tokens,
            "cache_tokens": {place.name: count for place, count in tokens.items()},
        }

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
        entry = await asyncio.to_thread(_entry, loader, model, self._host.has_weights)
        reason = entry["reason"] or (entry["fit"] and entry["fit"]["reason"])
        if not reason:
            reason = await asyncio.to_thread(loader.why_not, model)
        if reason:
            raise ShelfError(f"{name} cannot be loaded: {reason}")
        try:
            self._host.begin(model.name)
        except (HostBusyError, LoadFailedError) as error:
            raise ShelfError(str(error)) from None

    def start_pull(self, name: str, *, load: bool = False) -> None:
        """Begin a download, and load the model once it is here; ShelfError."""
        try:
            check_name(name)
        except PullError as error:
            raise ShelfError(str(error)) from None
        if self._pulling is not None:
            raise ShelfError(f"{self._pulling['name']} is being downloaded: stop that, or wait for it")
        self._pull_stopped.clear()
        self._pull_error = None
        self._pulling = {"name": name, "share": 0.0, "what": "Starting"}
        self._pull_task = asyncio.create_task(self._pull(name, load))
        self._publish()

    async def _pull(self, name: str, load: bool) -> None:
        loop = asyncio.get_running_loop()

        def arrived(share: float, what: str) -> None:
            loop.call_soon_threadsafe(self._pulled, {"name": name, "share": share, "what": what})

        try:
            await asyncio.to_thread(pull, name, arrived, self._pull_stopped)
            if load:
                await self.load(name)
        except PullStoppedError:
            pass
        except (PullError, ShelfError) as error:
            self._pull_error = str(error)
        except Exception as error:
            logger.exception("a download failed")
            self._pull_error = f"{name} could not be downloaded: {type(error).__name__}: {error}"
        self._pulling = self._pull_task = None
        await self.fresh_view()

    def _pulled(self, now: dict[str, Any]) -> None:
        before = self._pulling
        if before is not None:
            self._pulling = now
            if now["what"] != before["what"] or now["share"] >= before["share"] + 0.005:
                self._publish()

    def _publish(self) -> None:
        self._news.tell(MODELS)

    def _host_changed(self) -> None:
        self._publish()
        if self._host.loading is None:  # memory has changed, and so has what fits
            self._look_soon()

    def _look_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.fresh_view())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)


def _look(loader: ModelLoader, is_loaded: bool) -> list[dict[str, Any]]:
    return [_entry(loader, model, is_loaded) for model in loader.catalogue.models()]


def _entry(loader: ModelLoader, model: LocalModel, is_loaded: bool) -> dict[str, Any]:
    summary = model.summary
    fit: Fit | None = None
    reason = summary.reason
    runs_llamacpp = loader.runs_llamacpp(model)
    if summary.config is None or runs_llamacpp:
        reason = reason or loader.why_not(model)
    else:
        try:
            fit = loader.fit(summary.config, summary.form, is_loaded=is_loaded)
        except (ValueError, RuntimeError) as error:  # a GPU without bfloat16, say
            reason = str(error)
    is_own = summary.path.is_relative_to(own_folder()) and model.shape is None
    return model.to_json(fit, reason) | {
        "is_own": is_own,
        "backend": LLAMACPP if runs_llamacpp else NEO,
    }
