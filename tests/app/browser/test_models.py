"""The Models and Self-test views in a real browser: a real loader, a local hub, a stand-in for the bench."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import save_checkpoint
from fake_hub import FakeHub, serve_hub
from playwright.sync_api import Locator, expect

from neo_desktop.app.application import create_app
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue, own_folder
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.engine.options import EngineOptions
from neo_desktop.ui.page import mount

from ..conftest import served
from .conftest import ChatPage

pytestmark = pytest.mark.browser

REPORTER = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print(json.dumps({"share": 0.5, "what": "reading memory"}), file=sys.stderr, flush=True)
while not (folder.parent / "go").exists():
    time.sleep(0.05)
folder.mkdir(parents=True)
(folder / "report.html").write_text("<h1>It went well</h1><script>parent.hacked = 1</script>")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as monkeypatch, serving(folder, monkeypatch) as address:
        yield address


@contextlib.contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    data = folder / "data"
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(data))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setattr("neo_desktop.app.selftest.PROGRAM", (sys.executable, "-c", REPORTER))
    remote = save_checkpoint(folder / "remote", "llama")
    save_checkpoint(folder / "mine" / "torn", "llama")
    (folder / "mine" / "torn" / "model.safetensors").write_bytes(b"\xff" * 64)
    options = EngineOptions(device="cpu", gpu_cache_tokens=2048, cpu_cache_tokens=2048, policy="gpu-only")
    loader = ModelLoader(Catalogue([own_folder(), folder / "mine"]), options)
    app = create_app(ModelHost(load=loader, name=BUILTIN_NAME), data_folder=data, loader=loader)
    files = {file.name: file.read_bytes() for file in remote.iterdir()}
    with serve_hub(FakeHub({"org/tiny": files})) as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with served(mount(app)) as address:
            yield address


@pytest.fixture(scope="module")
def chat(url: str, new_page: Callable[..., ChatPage]) -> ChatPage:
    return new_page(url)


def card(chat: ChatPage, name: str) -> Locator:
    return chat.page.locator(f'#models [data-model="{name}"]')


def test_models_are_pulled_loaded_and_unloaded(url: str, chat: ChatPage) -> None:
    offer = chat.page.locator("#model-line").get_by_role("button", name="Get ")
    expect(offer).to_be_visible()  # only the built-in model can be run
    chat.page.goto(f"{url}/models")
    expect(card(chat, BUILTIN_NAME)).to_contain_text("Loaded")
    expect(card(chat, "torn")).to_contain_text("Cannot be run")
    name = chat.page.get_by_label("Get another model")
    name.fill("no-name")
    name.press("Enter")
    expect(chat.page.get_by_text("is no model's name")).to_be_visible()
    name.fill("org/tiny")
    name.press("Enter")
    card(chat, "org/tiny").get_by_role("button", name="Load", exact=True).click()
    expect(card(chat, "org/tiny")).to_contain_text("Loaded")
    card(chat, "org/tiny").get_by_role("button", name="Unload", exact=True).click()
    expect(card(chat, "org/tiny").get_by_role("button", name="Load", exact=True)).to_be_visible()
    chat.open(url)
    expect(chat.page.locator(".model-line")).to_have_attribute("data-state", "none")
    expect(offer).to_have_count(0)


def test_the_self_test_shows_its_progress_and_its_report(url: str, chat: ChatPage, folder: Path) -> None:
    """The report is shown in a frame without scripts."""
    chat.page.goto(f"{url}/self-test")
    chat.page.get_by_role("button", name="Start").click()
    expect(chat.page.locator("#selftest")).to_contain_text("reading memory")
    (folder / "data" / "selftest" / "go").touch()
    chat.page.get_by_role("button", name=re.compile("^20")).click()
    expect(chat.page.frame_locator("#report iframe").get_by_role("heading")).to_have_text("It went well")
    assert chat.page.evaluate("window.hacked") is None
