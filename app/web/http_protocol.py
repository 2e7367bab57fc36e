"""Limits of one connection that uvicorn's own protocol does not have."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_FILES = 4096  # open ones, connections included: enough to answer 503 beyond the queue's length
OTHER_FILES = 256  # that the model, the page and the system may open beside connections
_BUSY = (
    b'{"error":{"message":"too many connections are open","type":"server_error","param":null,"code":null}}'
)
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


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
        """Take in a part of a request."""
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

    Connections leave `OTHER_FILES` of them, or two thirds, to all else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return max(num_files - OTHER_FILES, num_files // 3)
