"""Attacks known from similar servers: Ollama, llama.cpp, Gradio, and HTTP servers in general."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from neo_desktop.ui.page import mount

from .chat_client import ChatClient
from .conftest import RunningServer, eventually, is_idle, running
from .fake_engine import FakeExecutor, make_engine

KEY = "a-secret-key"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks") / "data"


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    """A server with the page and the API, as in `neo-desktop chat`."""
    with running(make_engine(FakeExecutor()), data_folder=data, mount=mount) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same with a key."""
    folder = tmp_path_factory.mktemp("locked")
    with running(make_engine(FakeExecutor()), api_key=KEY, data_folder=folder, mount=mount) as running_server:
        yield running_server


def raw(server: RunningServer, request: bytes, timeout_s: float = 30) -> bytes:
    """Send raw bytes; return the answer until the server closes the connection or stays silent."""
    received = b""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s)
    with client, contextlib.suppress(ConnectionError, TimeoutError):
        client.sendall(request)
        while data := client.recv(65536):
            received += data
    return received


def statuses(received: bytes) -> list[bytes]:
    return [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]


def is_alive(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health", trust_env=False, timeout=30).is_success


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "name",
    ["../page.py", "..%2fpage.py", "%2e%2e/page.py", "..%252fpage.py", "....//page.py", "/etc/passwd",
     "%2fetc%2fpasswd", "..\\page.py", "app.js%00.html", "file:///etc/passwd", "%c0%ae%c0%ae/page.py", "."],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["/static/", "/assets/", "/", "/v1/models/", "/gradio_api/file="])
def test_path_traversal(server: RunningServer, prefix: str, name: str) -> None:
    # CVE-2023-51449 and -34239 (Gradio), CVE-2024-37032 (Ollama): files read through a path in the request.
    target = (prefix + name).encode()
    received = raw(server, b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % target)
    assert statuses(received)[0] in (b"400", b"403", b"404", b"405"), received
    assert b"root:" not in received
    assert b"import" not in received


@pytest.mark.parametrize("name", ["../../etc/passwd", "https://evil.example/model", "a\x00b", "file:///x"])
def test_names_of_models_are_never_files_or_addresses(http: httpx.Client, name: str) -> None:
    # CVE-2024-39722 (Ollama): the answer reveals which files exist on the disk.
    answer = http.post("/v1/chat/completions", json=CHAT | {"model": name})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:{port}/", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd",
     "data:image/png;base64,AAAA"],
)  # fmt: skip
def test_addresses_in_messages_are_not_fetched(http: httpx.Client, url: str) -> None:
    # SSRF, as CVE-2024-4325 (Gradio).
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.2)
        image = {"type": "image_url", "image_url": {"url": url.format(port=bait.getsockname()[1])}}
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
        assert answer.status_code == 400
        with pytest.raises(TimeoutError):
            bait.accept()


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\rb\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX y: 1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n X: folded\r\nX : 1\r\n\r\n",
        b"GET /hea\x00lth HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000,
    ],
)
def test_heads_that_are_no_http(server: RunningServer, request_head: bytes) -> None:
    # Line breaks and null bytes in headers, TLS on a plain port.
    assert b"200" not in statuses(raw(server, request_head, 0.5))
    assert is_alive(server)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_request_smuggling(server: RunningServer, framing: bytes) -> None:
    # One parser takes the rest for the body, another for a second request.
    smuggled = b"GET /stats HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    answered = statuses(raw(server, head + framing + smuggled, 0.5))
    assert len(answered) <= 1
    assert b"200" not in answered
    assert is_alive(server)


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (b"a" * 10**6),
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: %s\r\n\r\n" % (b"a" * 10**6),
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * 200_000,
    ],
)
def test_heads_without_end(server: RunningServer, request_head: bytes) -> None:
    # Memory that the server would allocate before it knows the request.
    assert b"200" not in statuses(raw(server, request_head, 0.5))
    assert is_alive(server)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10**6,
        b'{"messages":' * 10**5,
        b'{"prompt":"x","logit_bias":' + b'{"a":' * 10**5,
        b'{"prompt":"x","max_tokens":1' + b"0" * 10**5 + b"}",
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b"\x00",
        b"",
        b"null",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_bombs(http: httpx.Client, path: str, body: bytes) -> None:
    # Depth, long numbers and broken Unicode: a sentence, not a traceback.
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "string", "pattern": "(a+)+" * 200 + "$"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "array", "minItems": 10**9, "items": {"type": "string"}}}}},
        {"grammar": 'root ::= "a" root root root'},
        {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    ],
)  # fmt: skip
def test_grammar_bombs(server: RunningServer, http: httpx.Client, extra: dict[str, object]) -> None:
    # Schemas and grammars that recurse or grow without end: refused or followed, never a crash or a hang.
    answer = http.post("/v1/chat/completions", json=CHAT | extra, timeout=60)
    assert answer.status_code in (200, 400)
    assert is_alive(server)
    eventually(lambda: is_idle(server.service))


@pytest.mark.parametrize(
    "numbers",
    [{"max_tokens": -1}, {"max_tokens": 2**70}, {"n": 10**9}, {"top_k": -(10**9)}, {"seed": 2**200},
     {"logprobs": True, "top_logprobs": 10**6}, {"stop": ["x"] * 10**4}, {"stop_token_ids": [10**15]},
     {"logit_bias": {"99999999": 5}}, {"temperature": -5}, {"repetition_penalty": 0}],
)  # fmt: skip
def test_numbers_out_of_range(server: RunningServer, http: httpx.Client, numbers: dict[str, object]) -> None:
    # Numbers that reach native code unchecked (llama.cpp's server took a negative n_discard).
    answer = http.post("/v1/chat/completions", json=CHAT | numbers)
    assert answer.status_code in (200, 400), answer.text
    assert is_alive(server)


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "DEBUG", "get", "X" * 5000])
def test_other_methods(server: RunningServer, method: str) -> None:
    # TRACE would show a page its own cookies and keys.
    request = b"%s /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Secret: 1\r\n\r\n" % method.encode()
    received = raw(server, request, 0.5)
    assert b"200" not in statuses(received)
    assert b"X-Secret" not in received


def test_the_key_is_never_logged(executor: FakeExecutor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(make_engine(executor), api_key=KEY) as server:
        for key in (KEY, f"{KEY}x"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False, timeout=30)
            assert KEY not in answer.text
        raw(server, f"GET / HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nbroken\r\n\r\n".encode(), 0.5)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/stats", "/metrics", "/config", "/", "/assets/x.js", "/docs", "/openapi.json",
     "/gradio_api/queue/data", "/gradio_api/upload", "/theme.css", "//v1/models", "/v1/../v1/models"],
)  # fmt: skip
def test_nothing_but_health_is_open_where_there_is_a_key(locked: RunningServer, path: str) -> None:
    # Routes that could have missed the key check.
    request = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % path.encode()
    assert statuses(raw(locked, request)) == [b"401"]


def test_errors_show_nothing_of_the_program(executor: FakeExecutor) -> None:
    # Tracebacks and paths would help an attacker.
    async def broken() -> None:
        raise ValueError("/home/somebody/secret.py")

    with running(make_engine(executor)) as server:
        server.app.add_api_route("/broken", broken)
        answer = httpx.get(f"{server.url}/broken", trust_env=False, timeout=30)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "name", ["../../evil.txt", "a\x00.txt", "a" * 5000, "..\\..\\evil.txt", "/etc/passwd"]
)
def test_names_of_uploads_stay_in_their_folder(
    server: RunningServer, http: httpx.Client, data: Path, name: str
) -> None:
    # CVE-2024-47165 and relatives (Gradio): a file name that leads to a write outside the folder.
    answer = http.post("/gradio_api/upload", files={"files": (name, b"text")}, timeout=60)
    assert answer.status_code in (200, 400, 413, 422)
    uploads = data / "uploads"
    if answer.is_success:
        assert all(Path(path).resolve().is_relative_to(uploads) for path in answer.json())
    assert {path.name for path in data.parent.iterdir()} == {"data"}
    assert is_alive(server)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ["/gradio_api/queue/join", "/gradio_api/upload", "/gradio_api/call/chat"])
@pytest.mark.parametrize("head", [{}, {"Content-Length": str(600 << 20)}])
def test_a_body_of_600_mib_is_refused_and_fills_no_memory(
    server: RunningServer, http: httpx.Client, path: str, head: dict[str, str]
) -> None:
    # Gradio itself limits the size of files only, not of other bodies.
    sizes = [resident_bytes()]

    def body() -> Iterator[bytes]:
        for _ in range(600):
            yield b"x" * 2**20
            sizes.append(resident_bytes())

    assert http.post(path, content=body(), headers=head, timeout=60).status_code == 413
    assert max(sizes) - sizes[0] < 100 << 20
    assert is_alive(server)


@pytest.mark.parametrize(
    "path",
    ["/monitoring", "/login", "/logout", "/gradio_api/proxy=http://169.254.169.254/", "/gradio_api/mcp/",
     "/gradio_api/vibe-edit", "/gradio_api/vibe-code", "/gradio_api/runs", "/gradio_api/deep_link", "/user",
     "/gradio_api/openapi.json", "/gradio_api/stream/x", "/gradio_api/file/etc/passwd",
     "/gradio_api/dev/reload", "/gradio_api/file=/etc/passwd", "/gradio_api/file=http://169.254.169.254/",
     "/gradio_api/process_recording", "/gradio_api/run-history/records"],
)  # fmt: skip
def test_what_the_page_does_not_need_is_not_there(http: httpx.Client, path: str) -> None:
    # CVE-2024-1183, -2206, -4325 (Gradio): requests to other addresses and files through its routes.
    assert http.get(path).status_code == 404
    assert http.post(path, json={}).status_code == 404


def test_events_that_are_never_read_fill_no_memory(server: RunningServer, http: httpx.Client) -> None:
    functions = http.get("/config").json()["dependencies"]
    load = next(one["id"] for one in functions if one["targets"] and one["targets"][0][1] == "load")
    for number in range(60):
        body = {"data": [None, ""], "fn_index": load, "session_hash": f"unread{number}"}
        assert http.post("/gradio_api/queue/join", json=body).status_code in (200, 400, 503)
    chats = ChatClient(server.url)
    for number in range(12):  # every page receives an event for each chat
        chats.new_chat(seed=number)
    queue = server.app.routes[-1].app._app.get_blocks()._queue  # type: ignore[attr-defined]
    unread = queue.pending_messages_per_session
    assert all(unread[f"unread{number}"].qsize() < 10 for number in range(60))
    assert is_alive(server)
