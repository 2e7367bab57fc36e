"""The port of the server, its start and its end."""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 1  # at the end, clients get this long to read their last messages.
KEEP_ALIVE_S = 30  # a connection without a request.
GIL_SWITCH_S = 0.001  # how long the event loop waits at most while the engine's thread computes in Python
MAX_CONNECTIONS = 2048  # beyond them, requests get 503; more than may wait for the engine
OTHER_FILES = 256  # that the model, the page and the system may open beside connections

Stop = Callable[[], Awaitable[object]]


class PortError(OSError):
    """An address that cannot be listened on; the message says why and what to do."""


def claim_port(host: str, port: int) -> socket.socket:
    """Listen on an address, to reserve it while the model loads; port 0 takes a free one."""
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


def serve(app: ASGIApp, sock: socket.socket, stop: Stop, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM, then end the running requests by `stop`, close the socket and return.

    A second signal ends the process. `on_ready` is called once when requests are answered.
    """
    sys.setswitchinterval(GIL_SWITCH_S)
    with contextlib.suppress(ValueError):  # the system allows less
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_CONNECTIONS + OTHER_FILES, most))
    Server(app, stop, on_ready).run(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn, except that it ends requests rather than waits for them, and does not raise signals again."""

    def __init__(self, app: ASGIApp, stop: Stop, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                limit_concurrency=MAX_CONNECTIONS,
                ws="none",  # nothing here speaks WebSocket
                timeout_keep_alive=KEEP_ALIVE_S,
                log_config=None,
                log_level="error",  # what clients do wrong is theirs; it must not fill the log
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_graceful_shutdown=2 * GRACE_S,
            )
        )
        self._stop = stop
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End running requests before waiting for their connections to close."""
        await self._stop()
        # A page keeps a connection open while it is shown.
        asyncio.get_running_loop().call_later(GRACE_S, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the main loop; a second signal ends the process, since it finds the system's handler."""
        self.should_exit = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
