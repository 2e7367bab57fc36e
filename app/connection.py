"""One HTTP exchange: the body up to a limit, an answer in events, and a client that may leave at any time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neo_desktop.app.errors import ApiError


class ClientConnection:
    """ASGI middleware: reads the body before the app runs, and cancels the app when the client goes away.

    A cancelled app leaves its `async with` blocks, which is where requests are aborted and memory is freed;
    that holds for streams and for answers in one piece alike.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        num_bytes = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self._max_body_bytes:
                body += message.get("body", b"")
            more = message.get("more_body", False)
        # Only now, with the body read to its end: a client that is still sending would not see the answer.
        if num_bytes > self._max_body_bytes:
            limit_mib = self._max_body_bytes / 2**20
            refusal = ApiError(413, f"the body has {num_bytes} bytes, but {limit_mib:g} MiB is the limit")
            await refusal.response()(scope, receive, send)
            return
        await self._run_while_connected(bytes(body), scope, receive, send)

    async def _run_while_connected(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        is_gone = False
        is_read = False

        async def watch(answering: asyncio.Task[object]) -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            answering.cancel()

        async def read_body() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Future()  # `watch` waits for the disconnect
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        answering = asyncio.current_task()
        assert answering is not None
        watching = asyncio.create_task(watch(answering))
        try:
            await self._app(scope, read_body, send)
        except asyncio.CancelledError:
            if not is_gone or answering.uncancel() > 0:
                raise
        finally:
            watching.cancel()


class EventStream(Response):
    """Server-sent events; `resource` is left when the stream ends, for whatever reason."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], resource: AbstractAsyncContextManager[object]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._resource = resource

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with self._resource:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
