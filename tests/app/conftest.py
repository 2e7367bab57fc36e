"""A real server on a free port, in front of the fake engine."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from neo_desktop.app.application import create_app
from neo_desktop.app.engines.service import EngineLink, EngineService
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.server import Server, claim_port
from neo_desktop.engine.engine import Engine

from . import chat_client
from .fake_engine import FakeExecutor, make_engine


@dataclass
class RunningServer:
    """A server in a thread, with its clients."""

    engine: Any
    service: EngineService
    app: FastAPI
    server: Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def start(app: FastAPI) -> tuple[Server, threading.Thread, int]:
    """Serve an app from a thread; return its port last."""
    sock = claim_port("127.0.0.1", 0)
    is_ready = threading.Event()
    server = Server(app, app.state.host.stop, is_ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    assert is_ready.wait(30)
    return server, thread, sock.getsockname()[1]


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an app from a thread; yield its address."""
    server, thread, port = start(app)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def running(
    engine: Engine | EngineLink,
    *,
    max_queued_requests: int = 64,
    request_timeout_s: float | None = None,
    mount: Callable[[FastAPI], object] | None = None,
    **app_options: Any,
) -> Iterator[RunningServer]:
    service = EngineService(engine, request_timeout_s)
    service.max_queued_requests = max_queued_requests
    app = create_app(ModelHost(service), **app_options)
    if app.state.page is not None:
        chat_client.install(app)
    if mount is not None:
        mount(app)
    running_server = RunningServer(engine, service, app, *start(app))
    try:
        yield running_server
    finally:
        if isinstance(engine, Engine) and isinstance(engine.executor, FakeExecutor):
            engine.executor.open.set()
        running_server.stop()


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def server(executor: FakeExecutor) -> Iterator[RunningServer]:
    with running(make_engine(executor)) as running_server:
        yield running_server


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as plain:
        yield plain


def eventually(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    """Wait until another thread makes the condition true."""
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


async def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until another task makes the condition true."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


def is_idle(service: EngineService) -> bool:
    """Return True if no request runs or waits and every block is free."""
    stats = service.stats
    used = [pool.num_used_blocks for pool in stats.pools.values()]
    return stats.num_running == 0 and stats.num_waiting == 0 and not any(used)


@pytest.fixture
def prompts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts sent to the service so far."""
    found: list[str] = []
    submit = server.service.submit

    async def noting(prompts: Any, *args: Any, **options: Any) -> Any:
        found.extend(map(str, prompts))
        return await submit(prompts, *args, **options)

    monkeypatch.setattr(server.service, "submit", noting)
    return found
