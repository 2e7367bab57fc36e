"""Warnings beside an answer: what a request asked for and the answer does without."""

import logging
from contextvars import ContextVar
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = "x-neo-desktop-warning"
MAX_WARNINGS = 16  # headers of one answer
_MAX_CHARS = 400  # of one warning
_LOGGED = 256  # different warnings that the log holds once each

_current: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(message: str) -> None:
    """Add a sentence to the current answer's head and to the log; may be called in any of its threads.

    Call it before the first byte of the answer is sent.
    """
    plain = message[:_MAX_CHARS].encode("ascii", "backslashreplace").decode()
    plain = "".join(char if char.isprintable() else " " for char in plain)
    _log(plain)
    told = _current.get()
    if told is not None and plain not in told and len(told) < MAX_WARNINGS:
        told.append(plain)


@lru_cache(_LOGGED)
def _log(message: str) -> None:
    """Agents send the same request for hours: the log says each thing once."""
    logger.warning("%s", message)


class Warnings:
    """ASGI middleware: sends the warnings of a request in the head of its answer, one header each."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told: list[str] = []

        async def send_with_warnings(message: Message) -> None:
            if message["type"] == "http.response.start" and told:
                headers = [(HEADER.encode(), text.encode()) for text in told]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        token = _current.set(told)
        try:
            await self._app(scope, receive, send_with_warnings)
        finally:
            _current.reset(token)
