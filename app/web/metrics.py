"""Figures of HTTP for Prometheus."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HTTP_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 30, 60, 120, 300)
_OTHER_PATH = "other"  # one label for all that clients make up


def exposition(registries: Iterable[Collector | CollectorRegistry]) -> bytes:
    """All their figures in Prometheus's text format."""
    text = b""
    for source in registries:
        if not isinstance(source, CollectorRegistry):
            registry = CollectorRegistry()
            registry.register(source)
            source = registry  # noqa: PLW2901
        text += generate_latest(source)
    return text


class HttpMetrics:
    """ASGI middleware that counts answers and times them.

    Args:
        paths: the beginnings of paths with their own label; the rest has one, since clients may ask for
            any path.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, paths: Sequence[str]) -> None:
        self._app = app
        self._paths = sorted(paths, key=len, reverse=True)
        self._answers = Counter(
            "neo_desktop_http_requests", "Answers", ["method", "path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "neo_desktop_http_request_seconds",
            "From a request's head to the end of its answer",
            ["path"],
            buckets=HTTP_S,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = "none"  # the client left before there was one

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        path = self._label(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_PATH
        try:
            await self._app(scope, receive, send_and_look)
        finally:
            self._answers.labels(method, path, status).inc()
            self._seconds.labels(path).observe(time.monotonic() - begun_s)

    def _label(self, path: str) -> str:
        for known in self._paths:
            if path == known or path.startswith(f"{known}/"):
                return known
        return _OTHER_PATH


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
