"""One HTTP exchange: the body up to a limit, an answer in events, and a client that may leave at any time."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neo_desktop.app.errors import ApiError

BODY_TIMEOUT_S = 20.0  # until a body is complete ...
MIN_BYTES_PER_S = 16_384  # ... and this much longer for large ones
KEEP_ALIVE_S = 10.0  # between two signs of life of a stream
MAX_BYTES = 32 * 2**20  # of a body
MAX_EXCESS_BYTES = 64 * 2**20  # of a body that is too long, read so that its sender sees the answer


class ClientConnection:
    """ASGI middleware: reads the body before the app runs, and cancels the app when the client goes away.

    A cancelled app leaves its `async with` blocks, which is where requests are aborted and memory is freed;
    that holds for streams and for answers in one piece alike.

    HEAD works where GET does (uvicorn omits the body), and superfluous slashes in the path change nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = "/" + re.sub("/{2,}", "/", scope["path"]).strip("/")
        scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["method"] == "HEAD":
            scope["method"] = "GET"
        try:
            body = await self._read_body(receive)
            encoding = Headers(scope=scope).get("content-encoding", "identity")
            if body and encoding != "identity":
                raise ApiError(415, f"the body is encoded as {encoding[:40]!r}: send it plain")
        except ApiError as refusal:
            await refusal.response(path)(scope, receive, send)
            return
        if body is not None:
            await self._run_while_connected(body, scope, receive, send)

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Return the body; None: the client left."""
        body = bytearray()
        num_bytes = 0
        more = True
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as timeout:
                while more and num_bytes <= MAX_BYTES + MAX_EXCESS_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= MAX_BYTES:
                        body += message.get("body", b"")
                    else:
                        body.clear()
                    more = message.get("more_body", False)
                    timeout.reschedule(begun_s + BODY_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive: {num_bytes} bytes came in time") from None
        # Only now, with the body read to its end: a client that is still sending would not see the answer.
        if num_bytes > MAX_BYTES:
            limit_mib = MAX_BYTES / 2**20
            raise ApiError(413, f"the body has {num_bytes} bytes or more, but {limit_mib:g} MiB is the limit")
        return bytes(body)

    async def _run_while_connected(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.current_task()
        assert answering is not None
        is_gone = asyncio.Event()
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone.set()
            answering.cancel()

        async def read_body() -> Message:
            if not unread:
                await asyncio.Future()  # `watch` waits for the disconnect
            return unread.pop()

        watching = asyncio.create_task(watch())
        try:
            await self._app(scope, read_body, send)
        except asyncio.CancelledError:
            if not is_gone.is_set() or answering.uncancel() > 0:
                raise
        finally:
            watching.cancel()


def event(body: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    # Half a character may come from a client, for example in the name of a tool. JSON without spaces holds no
    # line breaks: one `data` line is enough.
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return head + b"data: " + data + b"\n\n"


class EventStream(Response):
    """Server-sent events; `resource` is left when the stream ends, for any reason.

    Its head is sent at once, and comments while there is nothing to tell: clients and proxies give up silent
    connections. (FastAPI's own events are for functions that do nothing else: ours find out from the body
    whether they stream, and refuse with a status before they do.)
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], resource: AbstractAsyncContextManager[object]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._resource = resource
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resource:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            beating = asyncio.create_task(self._beat(send))
            try:
                async for event in self._events:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            finally:
                beating.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Send a comment when nothing else was sent for a while: long prompts take minutes."""
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
