"""Limits on clients: slow senders, clients that do not read, large and numerous bodies, long requests."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

import neo_desktop.app.engines.generation
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ServiceError
from neo_desktop.app.templates import chat_templates
from neo_desktop.app.web import connection
from neo_desktop.app.web.server import LimitedProtocol
from neo_desktop.engine.sampling_params import SamplingParams

from .conftest import RunningServer, eventually, is_idle, running
from .fake_engine import FakeExecutor, make_engine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def read_to_end(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = client.recv(65536)
        assert data, received
        received += data
    return received


def drip(client: socket.socket, data: bytes) -> None:
    """Send small pieces until the server closes the connection."""
    for _ in range(3000):
        client.sendall(data)
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "stall_timeout_s", 0.3)
    monkeypatch.setattr(LimitedProtocol, "linger_s", 0.3)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.3)


@pytest.fixture
def quick_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "head_timeout_s", 0.3)


@pytest.mark.usefixtures("quick_heads")
@pytest.mark.parametrize("beginning", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX"])
def test_a_head_that_does_not_come_is_not_waited_for(server: RunningServer, beginning: bytes) -> None:
    clients = [connect(server) for _ in range(70)]
    for client in clients:
        client.sendall(beginning)
    assert [read_to_end(client) for client in clients] == [b""] * 70
    eventually(lambda: not server.server.server_state.connections)


@pytest.mark.usefixtures("quick_heads")
def test_a_head_that_drips_is_not_waited_for(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(client, b"X: y\r\n")


@pytest.mark.usefixtures("quick")
def test_a_body_that_does_not_come_is_refused(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(HEAD % 100 + b'{"prompt":')
        assert read_to_end(client).startswith(b"HTTP/1.1 408")


@pytest.mark.usefixtures("quick")
def test_who_goes_on_sending_after_the_answer_is_cut_off(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(HEAD.replace(b"127.0.0.1", b"evil.example") % 10**9)
        assert client.recv(65536).startswith(b"HTTP/1.1 403")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(client, b"x")


def test_an_idle_connection_may_wait_for_its_next_request(server: RunningServer) -> None:
    with connect(server) as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert read_until(client, b"alphabet").startswith(b"HTTP/1.1 200")
            time.sleep(0.05)


@pytest.mark.usefixtures("quick")
def test_who_does_not_read_stalls_alone_and_is_cut_off(server: RunningServer, http: httpx.Client) -> None:
    # The answer is larger than the system's socket buffer.
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "x", "n": 32, "max_tokens": 500, "stream": True, "logprobs": 5}
        content = json.dumps(body).encode()
        client.sendall(HEAD % len(content) + content)
        eventually(lambda: bool(server.service._generations))
        assert http.get("/health").is_success
        eventually(lambda: not server.server.server_state.connections or is_idle(server.service))
        eventually(lambda: len(server.server.server_state.connections) <= 1)  # the other client's
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).is_success


def test_what_nobody_reads_is_not_kept_for_ever(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neo_desktop.app.engines.generation, "MAX_UNREAD_OUTPUTS", 50)

    async def scenario() -> int:
        engine_service = EngineService(make_engine(executor))
        await engine_service.start()
        generation = await engine_service.submit(["x"], SamplingParams(max_tokens=400))
        await asyncio.to_thread(executor.begun.wait, 30)  # before that it also looks idle
        await asyncio.to_thread(eventually, lambda: is_idle(engine_service))
        num_read = 0

        async def read() -> None:
            nonlocal num_read
            async for _ in generation:
                num_read += 1

        with pytest.raises(ServiceError, match="not read for too long") as caught:
            await read()
        assert caught.value.code == "unread"
        await engine_service.stop()
        return num_read

    assert 50 <= asyncio.run(scenario()) < 400


@pytest.fixture
def strict(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(connection, "MAX_BYTES", 1000)
    monkeypatch.setattr(chat_templates, "MAX_MESSAGES", 3)
    with running(make_engine(executor), max_queued_requests=2, request_timeout_s=0.3) as running_server:
        yield running_server


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/v1/models", "/nothing"])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_bodies_are_limited_on_every_path(strict: RunningServer, path: str, is_chunked: bool) -> None:
    content = (b"x" * 100 for _ in range(11)) if is_chunked else b"x" * 1100
    answer = httpx.post(strict.url + path, content=content, trust_env=False, timeout=30)
    assert answer.status_code == 413
    assert "limit" in answer.json()["error"]["message"]


def test_a_body_without_end_is_not_read_for_ever(
    strict: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_EXCESS_BYTES", 100_000)
    with connect(strict) as client:
        client.sendall(HEAD % 10**12)
        client.sendall(b"x" * 200_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_messages_are_limited(strict: RunningServer) -> None:
    messages = [{"role": "user", "content": "x"}] * 4
    answer = httpx.post(
        f"{strict.url}/v1/chat/completions", json={"messages": messages}, trust_env=False, timeout=30
    )
    assert answer.status_code == 400
    assert "4 messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_ends(
    strict: RunningServer, executor: FakeExecutor, stream: bool
) -> None:
    executor.open.clear()
    with pytest.raises(openai.APIError, match=r"more than 0\.3 s"):
        list(strict.client().completions.create(model="alphabet", prompt="x", stream=stream))
    executor.open.set()
    eventually(lambda: is_idle(strict.service))


def test_connections_are_limited(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "max_connections", 3)
    clients = [connect(server) for _ in range(3)]
    eventually(lambda: len(server.server.server_state.connections) == 3)
    with connect(server) as one_more:
        assert read_to_end(one_more).startswith(b"HTTP/1.1 503")
    clients[0].close()
    eventually(lambda: len(server.server.server_state.connections) == 2)
    assert httpx.get(f"{server.url}/health", trust_env=False, timeout=30).is_success
    for client in clients:
        client.close()


@pytest.mark.parametrize("path", ["/health", "/stats", "/v1/models"])
def test_what_can_be_got_has_a_head(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert http.get(path).is_success  # on the same connection
