"""The target of a request, in the one form that routes know."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)


class RequestTarget:
    """ASGI middleware: `http://host/path` is `/path` of that host, and `/path/` is `/path`.

    RFC 9112, section 3.2.2: a server must take both forms; the target's host counts, not the header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(_plain(scope) if scope["type"] == "http" else scope, receive, send)


def _plain(scope: Scope) -> Scope:
    path, headers = scope["path"], scope["headers"]
    if absolute := _ABSOLUTE.match(path):
        path = path[absolute.end() :]
        headers = [(name, value) for name, value in headers if name != b"host"]
        headers.append((b"host", absolute[1].encode("latin-1", "replace")))
    path = "/" + re.sub("/{2,}", "/", path).strip("/")
    if path == scope["path"]:
        return scope
    return {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
