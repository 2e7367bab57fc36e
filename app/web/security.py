"""Access to the server: for programs and pages of this computer, unless its owner allows more."""

import contextlib
import ipaddress
import re
from base64 import b64decode
from collections.abc import Collection
from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from neo_desktop.app.errors import ApiError

_SITE = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")  # as in the Host header
_OPEN_PATHS = ("/health",)
_API_PATHS = ("/v1", "/api", "/stats", "/metrics", "/openapi.json")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d+|:\*)?")
_EXPOSED = ("Retry-After", "X-Request-Id", "X-Neo-Desktop-Warning")


def is_loopback(host: str) -> bool:
    """Return True if a host, by name or address, is this computer and nothing else."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")  # RFC 6761, section 6.3


def check_bind(host: str, api_key: str | None) -> None:
    """Raise ValueError for a server that is open to other computers without a key."""
    if not is_loopback(host) and not api_key:
        raise ValueError(
            f"the address {host!r} can be reached from other computers: set an API key (--api-key), "
            "or use 127.0.0.1"
        )


def check_origin(origin: str) -> str:
    """Return an origin that may be allowed, in lower case; "*" would let every page of the internet in."""
    if not _ORIGIN.fullmatch(origin.lower()):
        raise ValueError(
            f"{origin!r} is not an origin: give scheme and host, such as http://localhost:3000, "
            "http://localhost:* for any port, or app://obsidian.md"
        )
    return origin.lower()


def origins_pattern(origins: Collection[str]) -> str:
    """Return a regular expression for origins: each is exact, of any scheme; its port may be `*`."""
    patterns = [re.escape(check_origin(origin)).replace(r":\*", r"(?::\d+)?") for origin in origins]
    return f"(?i:{'|'.join(patterns) or '(?!)'})"


class AccessGuard:
    """ASGI middleware that checks where a request comes from.

    Framing: a body with two lengths is one body to us and another one to a proxy (request smuggling): 400.
    Host: a page on the internet can let its own name resolve to 127.0.0.1 (DNS rebinding); the browser then
    sends that name. Origin: a page of another site can post here without reading the answer. Both end in 403.
    The key, when there is one, is needed for everything but /health: 401. Programs send it as
    `Authorization: Bearer KEY`; for the page, browsers ask for it as the password of a login (any name).
    With a key, the server may also be addressed by any numeric address, since rebinding needs a name. Allowed
    hosts, without port, count like loopback ones; for allowed origins see `origins_pattern`. CORS comes
    first: allowed pages can read refusals as well.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None = None,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._api_key = api_key.encode() if api_key else None
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        pattern = origins_pattern(allowed_origins)
        self._allowed_origins = re.compile(pattern)
        self._entrance: ASGIApp = self._guard
        if allowed_origins:
            self._entrance = CORSMiddleware(
                self._guard,
                allow_origin_regex=pattern,
                allow_methods=("*",),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entrance(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
        elif scope["type"] != "websocket":  # nothing here speaks it
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin, path = headers.get("host", ""), headers.get("origin"), scope["path"]
        if "transfer-encoding" in headers and "content-length" in headers:
            return ApiError(400, "the body has two lengths", headers={"Connection": "close"})
        if not self._is_known(host) and not (self._api_key and _is_address(host)):
            message = (
                f"the host {host!r} is not allowed: use http://127.0.0.1, or start the server with this host "
                "among its allowed hosts"
            )
            return ApiError(403, message, code="host_not_allowed")
        if origin is not None and not self._may_use(origin, host):
            message = f"pages of {origin!r} are not allowed to use this server"
            return ApiError(403, message, code="origin_not_allowed")
        if self._api_key is None or path in _OPEN_PATHS:
            return None
        given = headers.get("x-api-key", "").encode("latin-1")  # what Anthropic's clients send
        given = given or _given_key(headers.get("authorization", ""))
        if compare_digest(given, self._api_key):
            return None
        is_api = any(path == api or path.startswith(f"{api}/") for api in _API_PATHS)
        challenge = "Bearer" if is_api else 'Basic realm="neo-desktop: the API key as password"'
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})

    def _may_use(self, origin: str, host: str) -> bool:
        site = origin.partition("://")[2]  # nothing is left of "null"
        return site == host or self._is_known(site) or self._allowed_origins.fullmatch(origin) is not None

    def _is_known(self, site: str) -> bool:
        host = _host_of(site)
        return is_loopback(host) or host in self._allowed_hosts


def _host_of(site: str) -> str:
    match = _SITE.fullmatch(site.lower())
    return match["host"] if match else ""


def _is_address(site: str) -> bool:
    try:
        ipaddress.ip_address(_host_of(site).strip("[]"))
    except ValueError:
        return False
    return True


def _given_key(authorization: str) -> bytes:
    """The key in an Authorization header: a bearer's token, or the password of a login."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    with contextlib.suppress(ValueError):  # not Base64: no key
        if scheme.lower() == "basic":
            return b64decode(value, validate=True).partition(b":")[2]
    return b""
