"""Tools of an MCP server in the chat page."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from neo_desktop.ui.page import mount

from ..conftest import RunningServer, running
from ..fake_engine import ScriptedExecutor, make_engine
from ..mcp_server import SECRET, Notes, notes_server
from .conftest import TEMPLATE, ChatPage

pytestmark = pytest.mark.browser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'


@pytest.fixture(scope="module")
def notes() -> Iterator[Notes]:
    with notes_server() as notes:
        yield notes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, notes: Notes) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"notes": notes.config}}))
    engine = make_engine(ScriptedExecutor(), num_blocks=4096, context_tokens=20_000, template=TEMPLATE)
    with running(engine, data_folder=folder, mount=mount) as server:
        yield server


def test_a_call_is_asked_for_shown_and_kept(chat: ChatPage, executor: ScriptedExecutor, notes: Notes) -> None:
    executor.answers = [f"I add.\n{CALL}", "It is 42.", CALL, "I would guess 42."]
    page, messages = chat.page, chat.page.locator("#messages")
    page.locator("#settings .toggle-button").click()
    box = page.get_by_role("checkbox", name="notes")
    expect(box).not_to_be_checked()
    box.check()
    expect(page.locator("#mcp-states")).to_contain_text("add, fail")
    chat.send("What is 20 + 22?")
    expect(messages).to_contain_text("May add of notes run with these arguments?")
    expect(messages).to_contain_text('"b": 22')  # unfolded: what is allowed is seen
    assert notes.calls == []
    chat.option("Allow").first.click()
    expect(messages).to_contain_text("It is 42.")
    assert notes.calls == [(20, 22)]
    expect(chat.option("Refuse")).to_have_count(0)
    page.reload()
    expect(messages).to_contain_text("It is 42.")
    expect(page.get_by_text('"b": 22')).to_have_count(0)  # folded
    messages.get_by_text("Tool add of notes").click()
    expect(messages).to_contain_text("Result")
    expect(messages.locator("pre").last).to_contain_text("42")
    chat.send("Again")
    chat.option("Refuse").click()
    expect(messages).to_contain_text("I would guess 42.")
    expect(messages).to_contain_text("Tool add of notes: refused")
    assert len(notes.calls) == 1
    assert SECRET not in page.content()
