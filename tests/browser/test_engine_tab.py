"""The Engine tab in a real browser, on the real server and engine, while chats stream."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cost_models import machine
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from neo_desktop import Engine
from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.server import create_app
from neo_desktop.ui.page import mount

from .conftest import free_port, serving

pytestmark = pytest.mark.browser

NUM_CHATS = 8
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    engine = Engine.from_pretrained(
        device="cpu",
        policy="neo",
        gpu_cache_tokens=320,
        cpu_cache_tokens=4096,
        cost_model=machine(cpu_token_ms=1e-6, hand_off_ms=0.0, num_layers=6),
    )
    host = ModelHost(EngineService(engine))
    return mount(create_app(host, data_folder=tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with serving(app, free_port()) as url:
        yield url


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """Eight requests at once, and new ones as they end."""
    is_over = threading.Event()

    def keep_asking(number: int) -> None:
        prompt = f"Chat {number} " + "tells a story. " * 5
        body = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True, "stream": True}
        while not is_over.is_set():
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False
            ) as reply:
                assert reply.status_code == 200
                for _ in reply.iter_lines():
                    if is_over.is_set():
                        return

    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(NUM_CHATS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_an_idle_engine_says_what_there_is_room_for(url: str, open_tab: Callable[..., Page]) -> None:
    page = open_tab(f"{url}/#/engine")
    expect(page.get_by_text("No chat is waiting for an answer.")).to_contain_text(
        "320 tokens on the imitated GPU"
    )
    expect(page.get_by_text("the GPU's part is imitated on the CPU")).to_be_visible()
    expect(page.get_by_text("it shows here")).to_be_visible()
    expect(page.get_by_text("Last iteration")).to_be_hidden()
    page.get_by_label("What is this: Chats?").click()
    expect(page.get_by_text("Each square is a chat")).to_be_visible()


def test_chats_in_both_places_are_seen_and_the_timeline_can_be_read(
    app: FastAPI, url: str, open_tab: Callable[..., Page]
) -> None:
    page = open_tab(f"{url}/#/engine")
    with streaming(url):
        expect(page.locator(".engine-sentence")).to_contain_text(
            re.compile(r"[78] chats at once: \d+ ha\w+ \w+ memory on the imitated GPU, \d+ in main memory"),
            timeout=PATIENCE_S * 1000,
        )
        expect(page.locator(".engine-dot.gpu").first).to_be_visible()
        expect(page.locator(".engine-dot.cpu").first).to_be_visible()
        expect(page.get_by_text("GPU memory alone would hold", exact=True)).to_be_visible()
        expect(page.locator(".engine-number").first).to_have_text(re.compile(r"[1-9]"))
        expect(page.get_by_text(re.compile(r"Overlap: \d+ %"))).to_be_visible(timeout=PATIENCE_S * 1000)
        timeline = page.locator(".engine-frame")
        for lane in ("imitated GPU", "CPU", "to main memory", "to the GPU"):
            expect(timeline.get_by_text(lane, exact=True)).to_be_visible()
        timeline.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".engine-readout")).to_contain_text(re.compile(r"imitated GPU: .*layer \d+.* ms"))
        before = page.locator(".engine-readout").text_content()
        page.wait_for_timeout(1500)  # it stays for as long as somebody reads it
        assert page.locator(".engine-readout").text_content() == before
    hub = app.state.hub
    assert hub.has_listeners("engine")
    page.get_by_role("link", name="Models").click()
    deadline = time.monotonic() + PATIENCE_S
    while hub.has_listeners("engine"):  # who looks elsewhere is told nothing
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def test_it_fits_a_phone_in_the_dark(url: str, open_tab: Callable[..., Page]) -> None:
    page = open_tab(f"{url}/#/engine", width=390, height=844, color_scheme="dark")
    expect(page.get_by_text("GPU-cache, imitated")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_a_model_there_is_a_sentence(tmp_path: Path, open_tab: Callable[..., Page]) -> None:
    app = mount(create_app(ModelHost(), data_folder=tmp_path))
    with serving(app, free_port()) as url:
        page = open_tab(f"{url}/#/engine")
        expect(page.locator(".engine-sentence")).to_contain_text("No model is loaded")
        expect(page.locator(".engine-grid")).to_be_hidden()
        page.goto("about:blank")
