"""The page's files, served as they lie in `static/`: no build step, nothing from elsewhere."""

import hashlib
import mimetypes
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

STATIC = Path(__file__).parent / "static"

# Whatever a model says or a file is called, the page runs its own scripts and asks its own server, no other.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; font-src 'self'; "
        "img-src 'self' data: blob:; frame-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Not from Python's table, which a system's own settings change.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def mount(app: FastAPI) -> FastAPI:
    """Serve the page at `/` and its files below `/static/`."""
    # Names are looked up in this table, never joined to a path: nothing else can be reached.
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page(request: Request) -> Response:
        return _serve(files["index.html"], request)

    @app.api_route("/static/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    def static(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _serve(files[name], request)

    return app


def _serve(path: Path, request: Request) -> Response:
    """The file, or 304 if the browser has it: it asks each time, so that an update shows at once."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return Response(content, headers=headers, media_type=kind or "application/octet-stream")
