"""The page's routes for models and the self-test, in front of the fake engine."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import save_checkpoint
from fastapi import FastAPI

from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue, LocalModel
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.model_shelf import ModelShelf
from neo_desktop.app.shelf.pull_errors import PullError
from neo_desktop.app.web.events import Hub
from neo_desktop.app.web.server import create_app
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.progress import Progress

from .fake_engine import FakeExecutor, make_engine

pytestmark = pytest.mark.anyio
TIMEOUT_S = 60


class FakeLoader(ModelLoader):
    """Finds real models and loads the fake engine."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue, EngineOptions(device="cpu"))
        self.open = threading.Event()
        self.open.set()
        self.loaded: list[str] = []

    def __call__(self, name: str, progress: Progress) -> EngineService:
        progress(0.5, "Loading weights")
        while not self.open.wait(0.01):
            progress(0.5, "Loading weights")
        engine = make_engine(FakeExecutor())
        engine.model_name = name
        self.loaded.append(name)
        return EngineService(engine)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLoader:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    save_checkpoint(tmp_path / "mine" / "tiny", "llama")
    save_checkpoint(tmp_path / "mine" / "broken", "llama")
    (tmp_path / "mine" / "broken" / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path / "mine" / "foreign", "llama")
    (tmp_path / "mine" / "foreign" / "model.safetensors").unlink()
    return FakeLoader(Catalogue([tmp_path / "mine"]))


@asynccontextmanager
async def page(loader: FakeLoader, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    host = ModelHost(load=loader, name=BUILTIN_NAME)
    app: FastAPI = create_app(host, data_folder=tmp_path / "data", loader=loader)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=TIMEOUT_S) as client,
    ):
        yield client


async def until(
    client: httpx.AsyncClient, holds: Callable[[dict[str, Any]], bool], path: str = "/api/models"
) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds(view := (await client.get(path)).json()):
            await asyncio.sleep(0.02)
    return view


async def test_models_are_shown_loaded_and_unloaded(loader: FakeLoader, tmp_path: Path) -> None:
    async with page(loader, tmp_path) as client:
        view = await until(client, lambda view: view["loading"] is None)
        assert view["loaded"]["name"] == BUILTIN_NAME
        models = {model["name"]: model for model in view["models"]}
        assert set(models) == {BUILTIN_NAME, "tiny", "broken", "foreign"}
        assert models["tiny"]["fit"]["chats"] > 0
        assert not models["foreign"]["runnable"]
        loader.open.clear()
        answer = await client.post("/api/models/load", json={"name": "tiny"})
        assert (answer.status_code, answer.json()["loading"]["name"]) == (202, "tiny")
        again = await client.post("/api/models/load", json={"name": BUILTIN_NAME})
        assert (again.status_code, "tiny is being loaded" in again.text) == (409, True)
        loader.open.set()
        view = await until(client, lambda view: view["loading"] is None)
        assert (view["loaded"]["name"], view["error"]) == ("tiny", None)
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.post("/api/models/unload")).json()["loaded"] is None
        assert (await client.get("/health")).json()["status"] == "no model"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "broken"}, 409),
        ({"name": "foreign"}, 409),
        ({"name": "nowhere"}, 404),
        ({"name": "../mine/tiny"}, 404),
        ({"name": 3}, 400),
        ({}, 400),
        ({"name": "tiny", "path": "/etc"}, 400),
        ([], 400),
    ],
)
async def test_what_cannot_be_loaded_leaves_the_loaded_model_alone(
    loader: FakeLoader, tmp_path: Path, body: Any, status: int
) -> None:
    async with page(loader, tmp_path) as client:
        await until(client, lambda view: view["loading"] is None)
        answer = await client.post("/api/models/load", json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert (await client.get("/health")).json()["status"] == "ok"
    assert loader.loaded == [BUILTIN_NAME]


async def test_a_download_is_told_and_can_be_stopped(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(name: str, progress: Progress, stopped: threading.Event) -> Path:
        progress(0.25, "model.safetensors")
        assert stopped.wait(TIMEOUT_S)
        raise PullError("huggingface.co cannot be reached: check the connection")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", slow)
    async with page(loader, tmp_path) as client:
        assert (await client.post("/api/models/pull", json={"name": "no-name"})).status_code == 400
        assert (await client.post("/api/models/pull", json={"name": "org/name"})).status_code == 202
        await until(client, lambda view: view["pulling"] and view["pulling"]["share"] == 0.25)
        assert (await client.post("/api/models/pull", json={"name": "org/name"})).status_code == 409
        view = (await client.post("/api/models/pull/stop")).json()
        assert view["pulling"] is None
        assert "check the connection" in view["pull_error"]


async def test_a_model_is_offered_where_only_the_builtin_one_is_and_loaded_once_it_is_here(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with page(loader, tmp_path) as client:
        assert (await client.get("/api/models")).json()["offer"] is None
    loader.catalogue = Catalogue([tmp_path / "none"])

    def arrive(name: str, progress: Progress, stopped: threading.Event) -> None:
        save_checkpoint(tmp_path / "data" / "models" / name, "llama")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", arrive)
    async with page(loader, tmp_path) as client:
        await until(client, lambda view: view["loading"] is None)
        offer = (await client.get("/api/models")).json()["offer"]
        assert offer["licence"] == "Apache-2.0"
        body = {"name": offer["name"], "load": True}
        assert (await client.post("/api/models/pull", json=body)).status_code == 202
        view = await until(
            client, lambda view: view["loaded"] is not None and view["loaded"]["name"] == offer["name"]
        )
        assert (view["offer"], view["pull_error"]) == (None, None)


REPORTER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir(parents=True)
(folder / "report.html").write_text("<script>alert(1)</script><h1>It went well")
"""


async def test_a_page_need_not_wait_until_the_folders_were_looked_at(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    ModelShelf(ModelHost(load=loader, name=BUILTIN_NAME), loader, hub)
    await hub.subscribe()
    look, disk_is_slow = loader.catalogue.models, threading.Event()

    def look_slowly() -> list[LocalModel]:
        assert disk_is_slow.wait(TIMEOUT_S)
        return look()

    monkeypatch.setattr(loader.catalogue, "models", look_slowly)
    save_checkpoint(tmp_path / "mine" / "new", "llama")

    async def names(news: AsyncIterator[tuple[str, Any]]) -> set[str]:
        return {model["name"] for model in (await anext(news))[1]["models"]}

    async with asyncio.timeout(TIMEOUT_S / 2), await hub.subscribe() as page:
        news = aiter(page)
        assert await names(news) == {BUILTIN_NAME, "tiny", "broken", "foreign"}
        disk_is_slow.set()
        assert "new" in await names(news)


async def test_the_self_test_leaves_the_memory_to_what_is_measured(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neo_desktop.app.selftest.PROGRAM", (sys.executable, "-c", REPORTER))
    async with page(loader, tmp_path) as client:
        await until(client, lambda view: view["loading"] is None)
        bad = await client.post("/api/selftest/start", json={"suites": ["coffee"]})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "suites")
        assert (await client.get("/api/selftest/report")).status_code == 404
        assert (await client.post("/api/selftest/start", json={"suites": ["hardware"]})).status_code == 202
        view = await until(client, lambda view: view["running"] is None, "/api/selftest")
        assert view["error"] is None
        report = await client.get("/api/selftest/report", params={"name": view["reports"][0]["name"]})
        assert "It went well" in report.text
        assert "sandbox;" in report.headers["Content-Security-Policy"]
        models = (await client.get("/api/models")).json()
        assert models["loaded"]["is_resting"]
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "fgh"
        assert loader.loaded == [BUILTIN_NAME] * 2
