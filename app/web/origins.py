"""Pages of other sites that may use the server (CORS)."""

import re
from collections.abc import Collection, Mapping

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d+|:\*)?")
_PORT = re.compile(r"(?::\d+)?")
PREFLIGHT_MAX_AGE_S = 600
_EXPOSED = b"retry-after, x-request-id, x-neo-desktop-warning"

Header = tuple[bytes, bytes]


def check_origin(pattern: str) -> str:
    """Return an origin that may be allowed, in lower case.

    Raises:
        ValueError: it is none; "*" would let every page of the internet in.
    """
    if not _ORIGIN.fullmatch(pattern.lower()):
        raise ValueError(
            f"{pattern!r} is not an origin: give scheme and host, such as http://localhost:3000, "
            "http://localhost:* for any port, or app://obsidian.md"
        )
    return pattern.lower()


class AllowedOrigins:
    """Says what a browser must be told, so that it lets pages of these origins read the answers.

    Args:
        patterns: exact origins, of any scheme; the port may be `*`.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        checked = [check_origin(pattern) for pattern in patterns]
        self._exact = frozenset(pattern for pattern in checked if not pattern.endswith(":*"))
        self._any_port = [pattern[:-2] for pattern in checked if pattern.endswith(":*")]

    def __bool__(self) -> bool:
        return bool(self._exact or self._any_port)

    def __contains__(self, origin: str) -> bool:
        origin = origin.lower()
        return origin in self._exact or any(
            origin.startswith(site) and _PORT.fullmatch(origin[len(site) :]) for site in self._any_port
        )

    def headers(self, origin: str | None) -> list[Header]:
        """What to add to any answer."""
        vary = (b"vary", b"Origin")  # caches must not give one site the answer to another
        if origin is None or origin not in self:
            return [vary]
        allow = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [vary, allow, (b"access-control-expose-headers", _EXPOSED)]

    def preflight(self, asked: Mapping[str, str]) -> list[Header]:
        """What else to answer a browser that asks before it sends the request itself."""
        wanted = asked.get("access-control-request-headers", "")
        headers = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
            (b"access-control-max-age", str(PREFLIGHT_MAX_AGE_S).encode()),
        ]
        if wanted:
            headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        # A page of the internet that asks for an address of this network, as Chromium has it.
        if "access-control-request-private-network" in asked:
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers
