"""Who is let in."""

import asyncio
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from neo_desktop.app.security import AccessGuard, check_bind

KEY = "a-key"


async def anything(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


def get(headers: Mapping[str, str | bytes], path: str = "/v1/models", **guard: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(AccessGuard(anything, **guard))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(request())


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
        ("/gradio_api/queue/join", None, 401),
        ("/health", None, 200),
    ],
)
def test_the_api_needs_its_key(path: str, authorization: str | None, status: int) -> None:
    headers = {"Authorization": authorization.encode()} if authorization else {}
    answer = get(headers, path, api_key=KEY)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(("host", "is_let_in"), [("127.0.0.1", True), ("evil.example", False)])
def test_websockets_are_checked_too(host: str, is_let_in: bool) -> None:
    reached: list[str] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", host.encode())]}
    asyncio.run(AccessGuard(app)(scope, receive, send))
    assert bool(reached) == is_let_in
    assert [message["type"] for message in sent] == ([] if is_let_in else ["websocket.close"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan", ""])
def test_other_addresses_need_a_key(host: str) -> None:
    check_bind(host, KEY)
    for no_key in (None, ""):
        with pytest.raises(ValueError, match="set an API key"):
            check_bind(host, no_key)
