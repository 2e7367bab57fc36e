"""Stands before Gradio: what it does not need to answer is not there, and its errors show no traceback."""

import logging
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neo_desktop.app.web.errors import ApiError

logger = logging.getLogger(__name__)

# Gradio's routes that the page and `gradio_client` use; a trailing slash stands for all below.
GRADIO_PATHS = (
    *("/", "/engine", "/models", "/self-test", "/config", "/theme.css", "/manifest.json", "/favicon.ico"),
    *("/assets/", "/static/", "/pwa_icon", "/pwa_icon/", "/svelte/"),
    *(
        "/gradio_api/upload",
        "/gradio_api/upload_progress",
        "/gradio_api/queue/join",
        "/gradio_api/queue/data",
    ),
    *(
        "/gradio_api/heartbeat/",
        "/gradio_api/cancel",
        "/gradio_api/info",
        "/gradio_api/call/",
        "/gradio_api/startup-events",
    ),
    *("/gradio_api/run/", "/gradio_api/component_server", "/gradio_api/reset"),
)
FILES = "/gradio_api/file="
OURS = ("/v1", "/health", "/metrics", "/stats", "/docs", "/openapi.json")
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        b"connect-src 'self'; font-src 'self' data:; img-src 'self' data: blob:; media-src 'self' blob:; "
        b"worker-src 'self' blob:; manifest-src 'self'; frame-src 'self'; base-uri 'self'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class PageGuard:
    """ASGI middleware: 404 for routes of Gradio that are not listed, 500 without a traceback for its errors.

    Args:
        uploads: the folder of which files may be read.
    """

    def __init__(self, app: ASGIApp, uploads: Path) -> None:
        self._app = app
        self._uploads = str(uploads.resolve())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or any(path == one or path.startswith(f"{one}/") for one in OURS):
            await self._app(scope, receive, send)
            return
        if not self._is_served(path):
            await ApiError(404, f"there is no {path}").response(path)(scope, receive, send)
            return
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            # What a browser sends wrongly: it must not fill the log.
            logger.warning("%s failed: %s: %s", path, type(error).__name__, str(error)[:200])
            if not has_begun:
                await ApiError(400, "the page's server did not understand this request").response(path)(
                    scope, receive, send
                )

    def _is_served(self, path: str) -> bool:
        if path.startswith(FILES):
            return str(Path(path.removeprefix(FILES)).resolve()).startswith(f"{self._uploads}/")
        return any(
            path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in GRADIO_PATHS
        )
