"""The composition root: builds the server of a model host out of its parts, and runs it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from neo_desktop.app.api.routes import create_api
from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.engines.metrics import EngineCollector
from neo_desktop.app.errors import NoModelError, ServiceError
from neo_desktop.app.live import EngineFeed
from neo_desktop.app.news import News
from neo_desktop.app.selftest import SelfTest
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.model_shelf import ModelShelf
from neo_desktop.app.web import errors
from neo_desktop.app.web.connection import ClientConnection
from neo_desktop.app.web.security import AccessGuard
from neo_desktop.app.web.warnings import Warnings


@dataclass(frozen=True, slots=True)
class PageServices:
    """The services that the page shows and drives; `trouble` says why this computer's GPU cannot be used."""

    host: ModelHost
    news: News
    chats: Chats
    engine: EngineFeed
    shelf: ModelShelf
    selftest: SelfTest
    data_folder: Path
    trouble: str | None


def create_app(
    host: ModelHost,
    *,
    api_key: str | None = None,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    model_aliases: Collection[str] = (),
    data_folder: Path | None = None,
    loader: ModelLoader | None = None,
    trouble: str | None = None,
) -> FastAPI:
    """Return the REST API; its start and end start and stop the service of the loaded model.

    Args:
        allowed_hosts: names, beside those of loopback, under which the server may be addressed.
        allowed_origins: sites whose pages may use the server, see `origins_pattern`.
        data_folder: where chats are kept, for the page; None: there is no page.
        loader: the host's, for the page to choose models; None: it cannot.
    """
    page = None
    if data_folder is not None:
        news = News()
        page = PageServices(
            host,
            news,
            Chats(host, news, data_folder),
            EngineFeed(host),
            ModelShelf(host, loader, news),
            SelfTest(news, host, data_folder / "selftest"),
            data_folder,
            trouble,
        )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await host.start()
        try:
            yield
        finally:
            if page is not None:
                await page.shelf.close()
                await page.selftest.close()
            await host.stop()
            if page is not None:
                await page.chats.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.state.host = host
    app.state.page = page
    # A request passes the layer added last first.
    app.add_middleware(Warnings)
    app.add_middleware(ClientConnection)
    app.add_middleware(
        AccessGuard, api_key=api_key, allowed_hosts=allowed_hosts, allowed_origins=allowed_origins
    )
    api = create_api(host, model_aliases)
    app.mount("/v1", api)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(await asyncio.to_thread(api.openapi))

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            service = host.service
            if service.refusal is not None and not host.is_resting:
                raise service.refusal.with_traceback(None)
        except ServiceError as reason:
            status = 200 if reason.health == "no model" else 503
            return JSONResponse({"status": reason.health, "reason": str(reason)}, status)
        facts = {"status": "ok", "model": service.model_name, "backend": service.stats.backend}
        return JSONResponse(facts if service.note is None else facts | {"note": service.note})

    @app.get("/metrics")
    async def metrics() -> Response:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        text = b""
        with contextlib.suppress(NoModelError):
            service = host.service
            registry.register(EngineCollector(service.stats, service.num_queued))
            text = generate_latest(service.metrics.registry)
        return Response(generate_latest(registry) + text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return host.service.stats.to_json()

    return app
