"""The page's routes for models and the self-test, in front of the fake engine."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from checkpoints import save_checkpoint
from fastapi import FastAPI

from neo_desktop.app.application import PageServices, create_app
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.news import MODELS, SELFTEST
from neo_desktop.app.selftest import SelfTestError
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue
from neo_desktop.app.shelf.hosting import ModelHost, ShelfError
from neo_desktop.app.shelf.hub_files import PullError
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.model_shelf import ModelShelf
from neo_desktop.app.shelf.packaged_model import NAME
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
    services: PageServices, holds: Callable[[ModelShelf], object], topic: str = MODELS
) -> ModelShelf:
    """Return the shelf once it meets the condition."""
    async with asyncio.timeout(TIMEOUT_S):
        with services.news.follow(topic) as changed:
            while not holds(services.shelf):
                await changed.wait()
                changed.clear()
    return services.shelf


async def test_models_are_shown_loaded_and_unloaded(loader: FakeLoader, tmp_path: Path) -> None:
    async with page(loader, tmp_path) as (services, client):
        shelf = await until(services, lambda shelf: shelf.host.loading is None and shelf.models)
        assert shelf.host.name == BUILTIN_NAME
        models = {one.model.name: one for one in shelf.models}
        assert set(models) == {BUILTIN_NAME, "tiny", "broken", "foreign"}
        assert models["tiny"].fit is not None
        assert models["tiny"].fit.chats > 0
        assert models["foreign"].reason is not None
        loader.open.clear()
        await shelf.load("tiny")
        assert shelf.host.loading is not None
        assert shelf.host.loading.name == "tiny"
        with pytest.raises(ShelfError, match="tiny is being loaded"):
            await shelf.load(BUILTIN_NAME)
        loader.open.set()
        await until(services, lambda shelf: shelf.host.loading is None)
        assert (shelf.host.name, shelf.host.error) == ("tiny", None)
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        await services.host.unload()
        assert not shelf.host.has_service
        assert (await client.get("/health")).json()["status"] == "no model"


async def test_a_draft_model_of_another_vocabulary_is_refused_before_the_loaded_model_goes(
    loader: FakeLoader, tmp_path: Path
) -> None:
    loader.options = replace(loader.options, draft_model=Path("tiny"))
    async with page(loader, tmp_path) as (services, _):
        await until(services, lambda shelf: shelf.host.has_service)
        with pytest.raises(ShelfError, match="vocabularies differ"):
            await services.shelf.load(BUILTIN_NAME)
        assert services.shelf.host.has_service
        await services.shelf.load("tiny")
        await until(services, lambda shelf: shelf.host.name == "tiny")


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
        await until(services, lambda shelf: shelf.pulling and shelf.pulling.share == 0.25)
        with pytest.raises(ShelfError, match="is being downloaded"):
            shelf.start_pull("org/name")
        await shelf.stop_pull()
        assert shelf.pulling is None
        assert "check the connection" in (shelf.pull_error or "")


async def test_a_model_is_offered_where_only_the_builtin_one_is_and_loaded_once_it_is_here(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with page(loader, tmp_path) as (services, _):
        await services.shelf.look()
        assert not services.shelf.has_offer
    loader.catalogue = Catalogue([tmp_path / "none"])

    def arrive(name: str, progress: Progress, stopped: threading.Event) -> None:
        save_checkpoint(tmp_path / "data" / "models" / name, "llama")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", arrive)
    async with page(loader, tmp_path) as (services, _):
        await until(services, lambda shelf: shelf.host.loading is None)
        await services.shelf.look()
        assert services.shelf.has_offer
        services.shelf.start_pull(NAME, load=True)
        shelf = await until(
            services, lambda shelf: shelf.host.has_service and shelf.host.name == NAME and not shelf.has_offer
        )
        assert shelf.pull_error is None


REPORTER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir(parents=True)
(folder / "report.html").write_text("<script>alert(1)</script><h1>It went well")
"""


async def test_the_self_test_leaves_the_memory_to_what_is_measured(
    loader: FakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neo_desktop.app.selftest.PROGRAM", (sys.executable, "-c", REPORTER))
    async with page(loader, tmp_path) as (services, client):
        selftest = services.selftest
        await until(services, lambda shelf: shelf.host.loading is None)
        with pytest.raises(SelfTestError, match="coffee"):
            selftest.start(["coffee"])
        assert selftest.reports() == []
        selftest.start(["hardware"])
        await until(services, lambda _: selftest.running is None, SELFTEST)
        assert selftest.error is None
        report = selftest.page(selftest.reports()[0])
        assert report is not None
        assert "It went well" in report.read_text()
        assert services.host.is_resting
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "fgh"
        assert loader.loaded == [BUILTIN_NAME] * 2
