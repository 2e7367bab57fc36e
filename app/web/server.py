"""The port of the server, its start and its end, and limits of connections that uvicorn does not have."""

import asyncio
import errno
import ipaddress
import json
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import h11
import psutil
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from neo_desktop.app.errors import ApiError

GRACE_S = 1  # at the end, clients get this long to read their last messages.
KEEP_ALIVE_S = 30  # a connection without a request.
ACCEPTS_PER_TURN = 4  # of the event loop: a connection that is refused takes some turns to close.
BACKLOG = 4096  # connections that the system holds until they are accepted.
GIL_SWITCH_S = 0.001  # how long the event loop waits at most while the engine's thread computes in Python
MAX_FILES = 4096  # open ones, connections included: enough to answer 503 beyond the queue's length
OTHER_FILES = 256  # that the model, the page and the system may open beside connections
LOG_PERIOD_S = 1.0  # between two lines of the log of one kind
_EVERYWHERE = ("0.0.0.0", "::")  # every address of this computer
_BUSY = json.dumps(ApiError(503, "too many connections are open").body).encode()
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)

Stop = Callable[[], Awaitable[object]]


def claim_port(host: str, port: int) -> socket.socket:
    """Listen on an address, to reserve it while the model loads; port 0 takes a free one. OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
        # asyncio turns off Nagle's algorithm, which holds small writes back for 40 ms, only on sockets that
        # name their protocol; accepted ones inherit it.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listening.detach())
    except OverflowError:
        raise OSError(f"port {port} does not exist: choose one from 0 to 65535") from None
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "is in use: stop the program that uses it, or choose another port",
            errno.EACCES: "may not be used: choose a port above 1023",
            socket.EAI_NONAME: "is not known: use 127.0.0.1",
            errno.EADDRNOTAVAIL: "is not an address of this computer: use 127.0.0.1",
        }.get(error.errno or 0, f"cannot be used: {error.strerror}")
        raise OSError(f"{host}:{port} {reason}") from error


def urls(host: str, port: int) -> list[str]:
    """Return the server's addresses: the one for this computer first, then those for others."""
    if host not in _EVERYWHERE:
        return [_url(host, port)]
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    others = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name not in states or states[name].isup
        others += [entry.address for entry in addresses if is_up and entry.family in families]
    return [_url("127.0.0.1", port), *(_url(other, port) for other in sorted(filter(_is_reachable, others)))]


def _is_reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: ASGIApp, sock: socket.socket, stop: Stop, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM, then end the running requests by `stop`, close the socket and return.

    A second signal ends the process. `on_ready` is called once when requests are answered.
    """
    sys.setswitchinterval(GIL_SWITCH_S)
    LimitedProtocol.max_connections = allow_connections()
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(OncePerSecond())
    Server(app, stop, on_ready).run(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn, except that it ends requests rather than waits for them, and does not raise signals again."""

    def __init__(self, app: ASGIApp, stop: Stop, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                ws="none",  # nothing here speaks WebSocket
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=ACCEPTS_PER_TURN,
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
        for listening in sockets or ():
            listening.listen(BACKLOG)
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


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 for clients that may be slow, but not for ever, and not in any number.

    A request's head must arrive within `head_timeout_s`. A client that does not read its answer is cut off
    after `stall_timeout_s`; one that was answered within its body may send for `linger_s` more.
    The body itself is timed by `ClientConnection`, which can still answer.
    """

    head_timeout_s = 15.0
    stall_timeout_s = 30.0
    linger_s = 3.0
    max_connections = MAX_FILES

    def __init__(self, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_BUSY_ANSWER)
            transport.close()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(self.linger_s, self.transport.abort)

    def pause_writing(self) -> None:
        """The client does not read: its request waits, but only so long."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        # What came in while the client is idle, in HTTP's sense, is a head that is not complete.
        is_incomplete = self.conn.their_state is h11.IDLE
        if is_incomplete and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)
        elif not is_incomplete and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def allow_connections() -> int:
    """Let this process have many connections, as far as the system lets it open files; return how many.

    Connections leave `OTHER_FILES` files, or two thirds, to all else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return max(num_files - OTHER_FILES, num_files // 3)


class OncePerSecond(logging.Filter):
    """Lets one message of a kind through per second, so that no client can fill the log.

    Messages are of one kind if they have exceptions of one type, or the same text before its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        kind = (record.name, error or record.msg)
        now_s = time.monotonic()
        if now_s < self._last_s.get(kind, float("-inf")) + LOG_PERIOD_S:
            return False
        self._last_s[kind] = now_s
        return True
