"""The HTTP server: its routes, its port, its start and its end."""

import asyncio
import contextlib
import dataclasses
import errno
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from neo_desktop.app import errors
from neo_desktop.app.api import create_api
from neo_desktop.app.open_files import allow_open_files
from neo_desktop.app.security import AccessGuard
from neo_desktop.app.service import EngineService, ServiceStoppedError

GRACE_S = 1  # at the end, clients get this long to read what they were told
MAX_CONNECTIONS = 16_384  # each is an open file; whom the queue has no room for must be told so


class PortError(OSError):
    """An address that cannot be listened on; the message says why and what to do."""


def create_app(
    service: EngineService, *, api_key: str | None = None, allowed_hosts: Collection[str] = ()
) -> FastAPI:
    """Return the REST API on a service; its start and end start and stop the service.

    Args:
        service: not started yet.
        api_key: needed for /v1 and /stats when given.
        allowed_hosts: names, beside those of loopback, under which the server may be addressed.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.state.service = service
    app.add_middleware(AccessGuard, api_key=api_key, allowed_hosts=allowed_hosts)
    app.mount("/v1", create_api(service))

    @app.get("/health")
    async def health() -> JSONResponse:
        refusal = service.refusal
        if refusal is None:
            return JSONResponse({"status": "ok", "model": service.model_name})
        status = "stopping" if isinstance(refusal, ServiceStoppedError) else "failed"
        return JSONResponse({"status": status, "reason": str(refusal)}, 503)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return dataclasses.asdict(service.stats)

    return app


def claim_port(host: str, port: int) -> socket.socket:
    """Listen on an address, so that nobody else gets it while the model loads; port 0 takes a free one.

    Raises:
        PortError: the address is in use, not this computer's, or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
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
    allow_open_files(MAX_CONNECTIONS)
    Server(app, on_ready).run(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn, except that requests are ended rather than waited for, and signals are not raised again."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_graceful_shutdown=2 * GRACE_S,
            )
        )
        self._service: EngineService = app.state.service
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell running requests before waiting for their connections to close."""
        await self._service.stop()
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
