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

from neo_desktop.app.application import create_app
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.news import MODELS, SELFTEST
from neo_desktop.app.page.selftest import SelfTestError
from neo_desktop.app.page.services import PageServices
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.model_shelf import ShelfError
from neo_desktop.app.shelf.pull_errors import PullError
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.progress import Progress

from .fake_engine import FakeExecutor, make_engine

pytestmark = pytest.mark.anyio
TIMEOUT_S = 60


class FakeLoader(ModelLoader):
    """Loader that finds real models and loads the fake engine."""

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
async def page(loader: FakeLoader, tmp_path: Path) -> AsyncIterator[tuple[PageServices, httpx.AsyncClient]]:
    host = ModelHost(load=loader, name=BUILTIN_NAME)
    app: FastAPI = create_app(host, data_folder=tmp_path / "data", loader=loader)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=TIMEOUT_S) as client,
    ):
        yield app.state.page, client


async def until(
    services: PageServices, holds: Callable[[dict[str, Any]], bool], topic: str = MODELS
) -> dict[str, Any]:
    """Return a topic's first view that meets the condition."""
    async with asyncio.timeout(TIMEOUT_S):
        with services.news.follow(topic) as changed:
            while True:
                changed.clear()
                view = services.selftest.view() if topic == SELFTEST else services.shelf.view()
                if holds(view):
                    return view
                await changed.wait()


async def test_models_are_shown_loaded_and_unloaded(loader: FakeLoader, tmp_path: Path) -> None:
    async with page(loader, tmp_path) as (services, client):
        view = await until(services, lambda view: view["loading"] is None and bool(view["models"]))
        assert view["loaded"]["name"] == BUILTIN_NAME
        models = {model["name"]: model for model in view["models"]}
        assert set(models) == {BUILTIN_NAME, "tiny", "broken", "foreign"}
        assert models["tiny"]["fit"]["chats"] > 0
        assert not models["foreign"]["runnable"]
        loader.open.clear()
        await services.shelf.load("tiny")
        assert services.shelf.view()["loading"]["name"] == "tiny"
        with pytest.raises(ShelfError, match="tiny is being loaded"):
            await services.shelf.load(BUILTIN_NAME)
        loader.open.set()
        view = await until(services, lambda view: view["loading"] is None)
        assert (view["loaded"]["name"], view["error"]) == ("tiny", None)
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        await services.shelf.unload()
        assert services.shelf.view()["loaded"] is None
        assert (await client.get("/health")).json()["status"] == "no model"


async def test_a_download_is_told_and_can_be_stopped(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(name: str, progress: Progress, stopped: threading.Event) -> Path:
        progress(0.25, "model.safetensors")
        assert stopped.wait(TIMEOUT_S)
        raise PullError("huggingface.co cannot be reached: check the connection")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", slow)
    async with page(loader, tmp_path) as (services, _):
        shelf = services.shelf
        with pytest.raises(ShelfError):
            shelf.start_pull("no-name")
        shelf.start_pull("org/name")
        await until(services, lambda view: view["pulling"] and view["pulling"]["share"] == 0.25)
        with pytest.raises(ShelfError, match="is being downloaded"):
            shelf.start_pull("org/name")
        await shelf.stop_pull()
        assert shelf.view()["pulling"] is None
        assert "check the connection" in shelf.view()["pull_error"]


async def test_a_model_is_offered_where_only_the_builtin_one_is_and_loaded_once_it_is_here(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with page(loader, tmp_path) as (services, _):
        assert (await services.shelf.fresh_view())["offer"] is None
    loader.catalogue = Catalogue([tmp_path / "none"])

    def arrive(name: str, progress: Progress, stopped: threading.Event) -> None:
        save_checkpoint(tmp_path / "data" / "models" / name, "llama")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", arrive)
    async with page(loader, tmp_path) as (services, _):
        await until(services, lambda view: view["loading"] is None)
        offer = (await services.shelf.fresh_view())["offer"]
        assert offer["licence"] == "Apache-2.0"
        services.shelf.start_pull(offer["name"], load=True)
        view = await until(
            services,
            lambda view: (view["loaded"] or {}).get("name") == offer["name"] and view["offer"] is None,
        )
        assert view["pull_error"] is None


REPORTER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir(parents=True)
(folder / "report.html").write_text("<script>alert(1)</script><h1>It went well")
"""


async def test_the_self_test_leaves_the_memory_to_what_is_measured(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neo_desktop.app.page.selftest.PROGRAM", (sys.executable, "-c", REPORTER))
    async with page(loader, tmp_path) as (services, client):
        selftest = services.selftest
        await until(services, lambda view: view["loading"] is None)
        with pytest.raises(SelfTestError, match="coffee"):
            selftest.start_on(services.host, ["coffee"])
        assert selftest.report(None) is None
        selftest.start_on(services.host, ["hardware"])
        view = await until(services, lambda view: view["running"] is None, SELFTEST)
        assert view["error"] is None
        report = selftest.report(view["reports"][0]["name"])
        assert report is not None
        assert "It went well" in report.read_text()
        assert services.shelf.view()["loaded"]["is_resting"]
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "fgh"
        assert loader.loaded == [BUILTIN_NAME] * 2
