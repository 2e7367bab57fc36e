"""Stands before Gradio: what it does not need to answer is not there, and its errors show no traceback."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neo_desktop.app.errors import ApiError

logger = logging.getLogger(__name__)

# Gradio's routes that the page and `gradio_client` use.
PAGES = frozenset(["/", "/engine", "/models", "/self-test"])
GRADIO_PATHS = PAGES | frozenset(
    [
        *("/config", "/theme.css", "/manifest.json", "/favicon.ico", "/pwa_icon"),
        *("/gradio_api/upload", "/gradio_api/upload_progress", "/gradio_api/queue/join"),
        *("/gradio_api/queue/data", "/gradio_api/cancel", "/gradio_api/info", "/gradio_api/reset"),
        *("/gradio_api/startup-events", "/gradio_api/component_server"),
    ]
)
GRADIO_FOLDERS = (
    *("/assets/", "/static/", "/pwa_icon/", "/svelte/"),
    "/gradio_api/call/",
)
FILES = "/gradio_api/file="
STREAMS = ("/gradio_api/queue/data", "/gradio_api/call/")
# Gradio itself adds what is meant for the head after its own scripts have run.
HEAD = f"<head><script>{(Path(__file__).parent / 'page.js').read_text(encoding='utf-8')}</script>".encode()
CONTENT_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # gr.HTML makes functions of its templates
        "style-src 'self' 'unsafe-inline'",
        "connect-src 'self'",
        "font-src 'self' data:",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "worker-src 'self' blob:",
        "manifest-src 'self'",
        "frame-src 'self'",
        "base-uri 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = [
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class PageGuard:
    """ASGI app around Gradio's: 404 for routes that are not listed, 400 without a traceback for its failures.

    Files may be read in the folder `uploads` only. `pace` is called with True when the first event stream
    opens, with False when the last one has closed.
    """

    def __init__(self, app: ASGIApp, uploads: Path, pace: Callable[[bool], None]) -> None:
        self._app = app
        self._uploads = uploads.resolve()
        self._pace = pace
        self._num_streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        if scope["type"] != "http":
            return
        if not self._is_served(path):
            await ApiError(404, f"there is no {path}").response(path)(scope, receive, send)
            return
        has_begun = has_failed = False
        start: Message = {}

        async def send_unless_failed(message: Message) -> None:
            nonlocal has_begun, has_failed, start
            if message["type"] == "http.response.start":
                has_failed = message["status"] >= 500
                start = message
                return
            if has_failed:
                return
            if not has_begun:
                headers = MutableHeaders(raw=[*start.get("headers", ()), *HEADERS])
                if path in PAGES:
                    message = {**message, "body": message.get("body", b"").replace(b"<head>", HEAD, 1)}
                    headers["content-length"] = str(len(message["body"]))
                elif path.startswith("/assets/"):  # their names have a hash of their content
                    headers["cache-control"] = "public, max-age=31536000, immutable"
                has_begun = True
                await send({**start, "headers": headers.raw})
            await send(message)

        is_stream = path.startswith(STREAMS)
        self._num_streams += is_stream
        if is_stream and self._num_streams == 1:
            self._pace(True)
        try:
            await self._app(scope, receive, send_unless_failed)
        except Exception as error:
            # A browser or a program sent what Gradio did not expect: one line in the log.
            logger.warning("%s failed: %s: %s", path, type(error).__name__, str(error)[:200])
            has_failed = True
        finally:
            self._num_streams -= is_stream
            if is_stream and not self._num_streams:
                self._pace(False)
        if has_failed and has_begun:
            with contextlib.suppress(Exception):  # it may have ended
                await send({"type": "http.response.body", "body": b""})
        elif has_failed:
            refusal = ApiError(400, "the page's server did not understand this request")
            await refusal.response(path)(scope, receive, send)

    def _is_served(self, path: str) -> bool:
        if path.startswith(FILES):
            try:
                return Path(path.removeprefix(FILES)).resolve().is_relative_to(self._uploads)
            except (ValueError, OSError):
                return False
        return path in GRADIO_PATHS or path.startswith(GRADIO_FOLDERS)
