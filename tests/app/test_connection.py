"""Clients that leave, on real sockets."""

import json
import socket
import time

import httpx
import pytest

from neo_desktop.app.web import connection as app_connection

from .conftest import RunningServer, eventually, is_idle
from .fake_engine import FakeExecutor

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def send(server: RunningServer, path: str, body: object) -> socket.socket:
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": ["a" * 50, "b" * 50], "n": 3})],
    ids=["chat", "completions"],
)
def test_a_client_that_leaves_frees_its_blocks(
    server: RunningServer, executor: FakeExecutor, path: str, body: dict[str, object], stream: bool
) -> None:
    executor.open.clear()
    connection = send(server, path, body | {"stream": stream, "max_tokens": 400})
    eventually(executor.begun.is_set)
    eventually(lambda: bool(server.service._generations))
    connection.close()
    eventually(lambda: not server.service._generations)
    executor.open.set()
    eventually(lambda: is_idle(server.service))
    assert server.service.stats.num_output_tokens < 400


def test_a_client_that_leaves_in_mid_stream_frees_its_blocks(
    server: RunningServer, executor: FakeExecutor
) -> None:
    executor.open.clear()
    connection = send(server, "/v1/chat/completions", CHAT | {"stream": True})
    for _ in range(3):
        executor.steps.release()
    while b'"content":"w"' not in connection.recv(65536):
        pass
    connection.close()
    eventually(lambda: not server.service._generations)
    executor.open.set()
    eventually(lambda: is_idle(server.service))


def test_a_client_that_leaves_while_it_is_queued_is_forgotten(
    server: RunningServer, executor: FakeExecutor
) -> None:
    executor.open.clear()
    first = send(server, "/v1/chat/completions", CHAT)
    eventually(executor.begun.is_set)
    second = send(server, "/v1/chat/completions", CHAT)
    eventually(lambda: len(server.service._generations) == 2)
    second.close()
    eventually(lambda: len(server.service._generations) == 1)
    first.close()
    executor.open.set()
    eventually(lambda: is_idle(server.service))


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_request(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
        )
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200
    eventually(lambda: is_idle(server.service))


def test_one_connection_serves_many_requests(http: httpx.Client) -> None:
    for stream in (True, False, True):
        answer = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2, "stream": stream})
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n") == stream


def test_a_stream_shows_that_it_lives_while_a_long_prompt_is_computed(
    server: RunningServer, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_connection, "KEEP_ALIVE_S", 0.01)
    executor.open.clear()
    body = CHAT | {"stream": True, "max_tokens": 2}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=30) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        executor.open.set()
        *_, done, _ = lines
    assert done == "data: [DONE]"


def test_a_client_with_little_patience_outlasts_a_long_prompt(
    server: RunningServer, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill takes longer than the client's read timeout."""
    monkeypatch.setattr(app_connection, "KEEP_ALIVE_S", 0.1)
    executor.open.clear()
    timeout = httpx.Timeout(30, read=6)
    url = f"{server.url}/v1/chat/completions"
    begun, last = time.monotonic(), ""
    with httpx.stream("POST", url, json=CHAT | {"stream": True}, trust_env=False, timeout=timeout) as answer:
        for line in answer.iter_lines():
            if time.monotonic() > begun + 7:
                executor.open.set()
            last = line or last
    assert last == "data: [DONE]"


def test_who_reads_with_openais_client_does_not_notice(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_connection, "KEEP_ALIVE_S", 0.001)
    stream = server.client().completions.create(model="alphabet", prompt="x", max_tokens=50, stream=True)
    assert len("".join(part.choices[0].text for part in stream)) == 50
