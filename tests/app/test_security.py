"""Access control: hosts, origins and API keys."""

import asyncio
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from neo_desktop.app.web.security import AccessGuard, check_bind

KEY = "a-key"


async def anything(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


def request(
    method: str, headers: Mapping[str, str | bytes], path: str = "/v1/models", **guard: Any
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(AccessGuard(anything, **guard))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def get(headers: Mapping[str, str | bytes], path: str = "/v1/models", **guard: Any) -> httpx.Response:
    return request("GET", headers, path, **guard)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "localhost:8000", "LocalHost", "app.localhost:1",
     "[::1]:8000", "box.lan:8000", "192.168.1.5"],
)  # fmt: skip
def test_own_hosts_are_let_in(host: str) -> None:
    assert get({"Host": host}, allowed_hosts=["box.lan", "192.168.1.5"]).text == "in"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:127", "192.168.1.5",
     "xlocalhost", "0.0.0.0", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1", "", "localhost:x",
     "localhost/x", "evil.example@127.0.0.1"],
)  # fmt: skip
def test_other_hosts_are_not(host: str) -> None:
    answer = get({"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("host", "status"), [("192.168.1.5:8000", 200), ("[fe80::1]", 200), ("box.lan", 403)]
)
def test_with_a_key_any_numeric_address_will_do(host: str, status: int) -> None:
    headers = {"Host": host, "Authorization": f"Bearer {KEY}"}
    assert get(headers, api_key=KEY).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("http://localhost:3000", 200),
        ("https://box.lan", 200),
        ("http://evil.example", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_pages_of_other_sites_are_not_let_in(origin: str, status: int) -> None:
    answer = get({"Host": "127.0.0.1:8000", "Origin": origin}, allowed_hosts=["box.lan"])
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/v1/models", f"Bearer {KEY}", 200),
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer wrong", 401),
        ("/v1/models", KEY, 401),
        ("/v1/models", "Bearer kéy", 401),
        ("/stats", None, 401),
        ("/v1", None, 401),
        ("/v1/models", f"bearer {KEY}", 200),
        ("/", None, 401),
        ("/", f"Basic {b64encode(f'anna:{KEY}'.encode()).decode()}", 200),
        ("/", f"Basic {b64encode(b'anna:wrong').decode()}", 401),
        ("/", "Basic %%%", 401),
        ("/gradio_api/info", None, 401),
        ("/health", None, 200),
    ],
)
def test_the_api_needs_its_key(path: str, authorization: str | None, status: int) -> None:
    headers = {"Authorization": authorization.encode()} if authorization else {}
    answer = get(headers, path, api_key=KEY)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_websockets_reach_nothing() -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(AccessGuard(app)(scope, anything, anything))  # type: ignore[arg-type]
    assert not reached


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan", ""])
def test_other_addresses_need_a_key(host: str) -> None:
    check_bind(host, KEY)
    for no_key in (None, ""):
        with pytest.raises(ValueError, match="set an API key"):
            check_bind(host, no_key)


ORIGINS = ["https://app.example", "http://localhost:*", "tauri://localhost", "chrome-extension://abc"]
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-a"}


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("https://app.example", True),
        ("HTTPS://App.Example", True),
        ("http://localhost", True),
        ("http://localhost:5173", True),
        ("tauri://localhost", True),
        ("chrome-extension://abc", True),
        ("http://app.example", False),
        ("https://app.example:444", False),
        ("https://app.example.evil", False),
        ("https://evil.example", False),
        ("http://localhost.evil:80", False),
        ("http://localhost:80.evil", False),
        ("null", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_pages_of_allowed_origins_may_read(origin: str, is_allowed: bool, method: str) -> None:
    headers = {"Host": "127.0.0.1", "Origin": origin}
    headers |= PREFLIGHT if method == "OPTIONS" else {"Authorization": f"Bearer {KEY}"}
    answer = request(method, headers, api_key=KEY, allowed_origins=ORIGINS)
    assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
    assert "Origin" in answer.headers["vary"]
    refused = 400 if method == "OPTIONS" else 403
    assert answer.status_code == (200 if is_allowed else refused)


def test_a_preflight_is_answered_before_the_key_is_asked_for() -> None:
    headers = {"Host": "127.0.0.1", "Origin": "tauri://localhost", **PREFLIGHT}
    headers["Access-Control-Request-Private-Network"] = "true"
    answer = request("OPTIONS", headers, api_key=KEY, allowed_origins=ORIGINS)
    assert answer.status_code == 200
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-a"
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_a_page_can_read_why_it_was_refused() -> None:
    headers = {"Host": "127.0.0.1", "Origin": "tauri://localhost"}
    answer = request("POST", headers, api_key=KEY, allowed_origins=ORIGINS)
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "tauri://localhost"


def test_without_origins_no_page_may_read() -> None:
    headers = {"Host": "127.0.0.1", "Origin": "http://localhost:3000"}
    assert not [name for name in get(headers).headers if name.startswith("access-control")]
    assert request("OPTIONS", headers | PREFLIGHT, api_key=KEY).status_code == 401


@pytest.mark.parametrize(
    "pattern", ["*", "localhost", "https://*", "https://a/b", "null", "", "a://b\r\nX: y"]
)
def test_what_is_no_origin_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        AccessGuard(anything, allowed_origins=[pattern])
