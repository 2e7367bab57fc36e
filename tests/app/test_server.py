"""The port, and the end of the server."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neo_desktop.app.web.server import claim_port

from .conftest import RunningServer, eventually, running
from .fake_engine import MODEL, FakeExecutor, make_engine

PROGRAM = """
    import sys, threading
    sys.path.insert(0, {tests!r})
    from app.fake_engine import FakeExecutor, make_engine
    from neo_desktop.app.shelf.hosting import ModelHost
    from neo_desktop.app.application import create_app
    from neo_desktop.app.web.server import claim_port, serve
    from neo_desktop.app.engines.service import EngineService

    executor = FakeExecutor()
    {prepare}
    sock = claim_port("127.0.0.1", 0)
    app = create_app(ModelHost(EngineService(make_engine(executor))))
    serve(app, sock, app.state.host.stop, lambda: print(sock.getsockname()[1], flush=True))
    print("the end", flush=True)
"""


def test_a_claimed_port_is_nobody_elses() -> None:
    with claim_port("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} is in use.*choose another port"):
            claim_port("127.0.0.1", port)
    claim_port("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("192.0.2.1", 0, "not an address of this computer"),
        ("no.such.host.invalid", 0, "not known|cannot be used"),
        ("127.0.0.1", 70_000, "does not exist"),
        ("::2", 0, "not an address|cannot be used"),
    ],
)
def test_an_address_that_cannot_be_used_says_why(host: str, port: int, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        claim_port(host, port)


def test_an_app_with_a_key_needs_it(executor: FakeExecutor) -> None:
    with running(make_engine(executor), api_key="a-key", allowed_hosts=["box.lan"]) as server:
        assert server.client("a-key").models.list().data[0].id == MODEL
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert httpx.get(
            f"{server.url}/health", headers={"Host": "box.lan"}, trust_env=False, timeout=30
        ).is_success
        answer = httpx.get(
            f"{server.url}/health", headers={"Host": "evil.example"}, trust_env=False, timeout=30
        )
        assert answer.status_code == 403


def test_the_end_is_told_to_streams_and_to_those_who_wait(
    server: RunningServer, executor: FakeExecutor
) -> None:
    executor.open.clear()
    body = {"prompt": "abc", "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, trust_env=False, timeout=30
    ) as stream:
        executor.steps.release()
        lines = stream.iter_lines()
        assert '"text":"d"' in next(lines)
        server.server.should_exit = True
        *_, error, _, done, _ = lines
    assert "the server is shutting down" in error
    assert done == "data: [DONE]"
    executor.open.set()
    server.thread.join(30)
    assert not server.engine.has_work
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False, timeout=30)


def test_a_page_that_stays_open_does_not_keep_the_server_up(
    executor: FakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    class StaysOpen(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

    with running(make_engine(executor)) as server:
        server.app.add_route("/page", lambda _: StaysOpen())
        with httpx.stream("GET", f"{server.url}/page", trust_env=False, timeout=30) as page:
            server.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                page.read()
    assert not caplog.records


@contextmanager
def program(prepare: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    source = textwrap.dedent(PROGRAM).format(tests=str(Path(__file__).parent.parent), prepare=prepare)
    with subprocess.Popen([sys.executable, "-P", "-c", source], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@pytest.mark.parametrize("limit", [64, 200])
def test_idle_connections_leave_files_to_the_engine(tmp_path: Path, limit: int) -> None:
    log = tmp_path / "log"
    lower = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
        f"import sys; sys.stderr = open({str(log)!r}, 'w', buffering=1)"
    )
    with program(lower) as (_, url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ExitStack() as connections:
            for _ in range(5 * limit):
                connections.enter_context(socket.create_connection(address, timeout=30))
            answer = httpx.get(f"{url}/health", trust_env=False, timeout=30)
            assert answer.status_code == 503
            assert "too many connections" in answer.text
            time.sleep(1)

        def is_well() -> bool:
            return httpx.get(f"{url}/health", trust_env=False, timeout=30).is_success

        eventually(is_well)
        assert httpx.post(
            f"{url}/v1/completions", json={"prompt": "x"}, trust_env=False, timeout=30
        ).is_success
    assert len(log.read_text().splitlines()) < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_program_cleanly(number: signal.Signals) -> None:
    with program() as (process, url):
        assert httpx.get(f"{url}/health", trust_env=False, timeout=30).is_success
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
        assert (output, process.returncode) == ("the end\n", 0)


def test_a_second_signal_ends_the_program_at_once() -> None:
    with program("executor.open.clear()") as (process, url):
        body = {"prompt": "abc", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=30) as stream:
            process.send_signal(signal.SIGINT)
            assert "shutting down" in stream.read().decode()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert (output, process.returncode) == ("", -signal.SIGINT)
