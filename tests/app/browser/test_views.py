"""The Engine, Models and Self-test views, in a real browser."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from ..conftest import RunningServer, eventually
from ..fake_engine import ScriptedExecutor
from .conftest import ChatPage

pytestmark = pytest.mark.browser


@contextlib.contextmanager
def writing_slowly(executor: ScriptedExecutor) -> Iterator[None]:
    """Let the engine step now and then, and finish all steps at the end."""
    is_over = threading.Event()

    def step() -> None:
        while not is_over.wait(0.05):
            executor.steps.release()

    thread = threading.Thread(target=step)
    thread.start()
    yield
    is_over.set()
    thread.join()
    executor.open.set()


def test_the_engine_view_shows_who_is_served_and_costs_nothing_when_left(
    chat: ChatPage, executor: ScriptedExecutor, server: RunningServer
) -> None:
    executor.answers = ["word " * 400]
    executor.open.clear()
    chat.send("hello")
    expect(chat.stop).to_be_visible()
    chat.page.goto(f"{server.url}/engine")
    with writing_slowly(executor):
        expect(chat.page.locator("#engine")).to_contain_text("GPU-cache")
        expect(chat.page.locator("#engine .dot")).to_have_count(1)
    expect(chat.page.locator("#engine")).to_contain_text("Ask something")
    looked = 0
    service, look = server.service, server.service.live_view

    async def counted() -> object:
        nonlocal looked
        looked += 1
        return await look()

    service.live_view = counted  # type: ignore[method-assign]
    eventually(lambda: looked >= 2)
    chat.page.goto(f"{server.url}/models")
    expect(chat.page.locator("#models")).to_contain_text("One model is loaded at a time")
    eventually(lambda: not server.app.state.page.news._followers.get("nobody"))
    before = looked
    chat.page.wait_for_timeout(1500)
    assert looked <= before + 1


def test_an_idle_page_runs_no_timer_at_each_frame(chat: ChatPage) -> None:
    chat.page.add_init_script(
        """const native = window.requestAnimationFrame; window.frames_asked = 0;
        window.requestAnimationFrame = (draw) => { window.frames_asked++; return native(draw); };"""
    )
    chat.page.reload()
    expect(chat.page.locator(".model-line")).to_be_visible()
    expect(chat.box).to_be_editable()
    asked = 0
    for _ in range(10):  # the first frames belong to the load
        before = chat.page.evaluate("window.frames_asked")
        chat.page.wait_for_timeout(1000)
        asked = chat.page.evaluate("window.frames_asked") - before
        if asked < 10:
            break
    assert asked < 10
