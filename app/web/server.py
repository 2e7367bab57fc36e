"""The HTTP server: its routes, its port, its start and its end."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from neo_desktop.app.api import create_api, docs_page
from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.live.feed import EngineFeed
from neo_desktop.app.news import News
from neo_desktop.app.page_services import PageServices
from neo_desktop.app.selftest import SelfTest, reports_folder
from neo_desktop.app.service import EngineService
from neo_desktop.app.service_errors import ServiceStoppedError
from neo_desktop.app.shelf.hosting import (
    EngineGoneError,
    ModelHost,
    ModelLoadingError,
    NoModelError,
    RestartingError,
)
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.model_shelf import ModelShelf
from neo_desktop.app.web import errors
from neo_desktop.app.web.connection import ClientConnection
from neo_desktop.app.web.http_protocol import (
    ACCEPTS_PER_TURN,
    LimitedProtocol,
    Turnstile,
    allow_connections,
)
from neo_desktop.app.web.limits import DEFAULT_LIMITS, ServerLimits
from neo_desktop.app.web.metrics import EngineCollector, HttpMetrics, exposition
from neo_desktop.app.web.open_files import OncePerSecond
from neo_desktop.app.web.request_target import RequestTarget
from neo_desktop.app.web.security import AccessGuard
from neo_desktop.app.web.warnings import Warnings

GRACE_S = 1  # at the end, clients get this long to read what they were told
COUNTED_PATHS = (
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages", "embeddings")),
    *("/v1/models", "/gradio_api", "/", "/health", "/stats", "/metrics", "/docs"),
    "/openapi.json",
)
KEEP_ALIVE_S = 30  # a connection without a request
BACKLOG = 4096  # connections that the system holds until they are accepted
_once_per_second = OncePerSecond()
GIL_SWITCH_S = 0.001  # how long the event loop waits at most while the engine's thread computes in Python


class PortError(OSError):
    """An address that cannot be listened on; the message says why and what to do."""


def create_app(
    host: ModelHost,
    *,
    api_key: str | None = None,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    model_aliases: Collection[str] = (),
    limits: ServerLimits = DEFAULT_LIMITS,
    data_folder: Path | None = None,
    loader: ModelLoader | None = None,
    trouble: str | None = None,
) -> FastAPI:
    """Return the REST API; its start and end start and stop the service of the loaded model.

    Args:
        host: not started yet.
        api_key: needed for /v1 and /stats when given.
        allowed_hosts: names, beside those of loopback, under which the server may be addressed.
        allowed_origins: sites whose pages may use the server, see `AllowedOrigins`.
        model_aliases: further names of the loaded model, see `create_api`.
        limits: what requests may take; those of the service are its own.
        data_folder: where chats are kept, for the page; None: there is no page.
        loader: the host's, for the page to choose models; None: it cannot.
        trouble: what keeps this computer's GPU from being used, for the page to show.

    Raises:
        StoreError: chats cannot be kept there.
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
            SelfTest(news, reports_folder(data_folder)),
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

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.state.host = host
    app.state.page = page
    http_registry = CollectorRegistry()
    ProcessCollector(registry=http_registry)
    guard = partial(
        AccessGuard, api_key=api_key, allowed_hosts=allowed_hosts, allowed_origins=allowed_origins
    )
    _add_layers(app, guard, http_registry, limits)
    app.mount("/v1", create_api(host, max_messages=limits.max_messages, model_aliases=model_aliases))
    docs_page.install(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            service = host.service
        except RestartingError as reason:
            return JSONResponse({"status": "restarting", "reason": str(reason)}, 503)
        except EngineGoneError as reason:
            return JSONResponse({"status": "failed", "reason": str(reason)}, 503)
        except ModelLoadingError as reason:
            return JSONResponse({"status": "loading", "reason": str(reason)}, 503)
        except NoModelError as reason:
            return JSONResponse({"status": "no model", "reason": str(reason)})
        refusal = service.refusal
        if refusal is None:
            return JSONResponse(_health(service))
        status = "stopping" if isinstance(refusal, ServiceStoppedError) else "failed"
        return JSONResponse({"status": status, "reason": str(refusal)}, 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        sources: list[Collector] = [http_registry]
        with contextlib.suppress(NoModelError):
            service = host.service
            sources += [service.metrics.registry, EngineCollector(service.stats, service.num_queued)]
        return Response(exposition(sources), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return host.service.stats.to_json()

    return app


def _add_layers(
    app: FastAPI, guard: Callable[[ASGIApp], ASGIApp], registry: CollectorRegistry, limits: ServerLimits
) -> None:
    """Add what sees requests before routes do; the layer added last sees them first."""
    app.add_middleware(Warnings)
    app.add_middleware(ClientConnection, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(guard)
    app.add_middleware(HttpMetrics, registry=registry, paths=COUNTED_PATHS)
    app.add_middleware(RequestTarget)


def _health(service: EngineService) -> dict[str, str]:
    facts = {"status": "ok", "model": service.model_name, "backend": service.stats.backend}
    return facts if service.note is None else facts | {"note": service.note}


def claim_port(host: str, port: int) -> socket.socket:
    """Listen on an address, so that nobody else gets it while the model loads; port 0 takes a free one.

    Raises:
        PortError: the address is in use, not this computer's, or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
        # asyncio turns off Nagle's algorithm, which holds small writes back for 40 ms, only on sockets that
        # name their protocol; accepted ones inherit it.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listening.detach())
    except OverflowError:
        raise PortError(f"port {port} does not exist: choose one from 0 to 65535") from None
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "is in use: stop the program that uses it, or choose another port",
            errno.EACCES: "may not be used: choose a port above 1023",
            socket.EAI_NONAME: "is not known: use 127.0.0.1",
            errno.EADDRNOTAVAIL: "is not an address of this computer: use 127.0.0.1",
        }.get(error.errno or 0, f"cannot be used: {error.strerror}")
        raise PortError(f"{host}:{port} {reason}") from error


def serve(app: FastAPI, sock: socket.socket, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM, then tell running requests and return; a second signal ends the process.

    Args:
        app: made by `create_app`.
        sock: made by `claim_port`; closed in the end.
        on_ready: called once when requests are answered.
    """
    sys.setswitchinterval(GIL_SWITCH_S)
    LimitedProtocol.max_connections, accepts_per_turn = allow_connections()
    for name in ("asyncio", "uvicorn.error", errors.__name__):
        logging.getLogger(name).addFilter(_once_per_second)
    Server(app, on_ready, accepts_per_turn).run(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn, except that requests are ended rather than waited for, and signals are not raised again."""

    def __init__(
        self,
        app: FastAPI,
        on_ready: Callable[[], None] | None = None,
        accepts_per_turn: int = ACCEPTS_PER_TURN,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, Turnstile())),
                ws="none",  # nothing here speaks WebSocket
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=accepts_per_turn,
                log_config=None,
                log_level="error",  # what clients do wrong is theirs; it must not fill the log
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_graceful_shutdown=2 * GRACE_S,
            )
        )
        self._host: ModelHost = app.state.host
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell running requests before waiting for their connections to close."""
        await self._host.stop()
        # A page keeps a connection open for as long as it is shown.
        asyncio.get_running_loop().call_later(GRACE_S, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let the first signal end the server, and a second one the process."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread only
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(number, self.handle_exit) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, handlers, strict=True):
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the main loop to end."""
        self.should_exit = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
