"""Many chats, reloads, several tabs, a server that goes and comes back."""

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from neo_desktop.ui.page import mount

from .chat_page import ChatPage
from .conftest import free_port, serving
from .fake_server import FakeServer

pytestmark = pytest.mark.browser

HELLO = "Hello from the fake server."


def test_a_reload_while_an_answer_streams_loses_nothing(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.pause_s = [f"w{number} " for number in range(300)], 0.02
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("w5")
    chat.page.reload()
    expect(chat.questions).to_have_count(1)
    expect(chat.last_answer).to_contain_text("w299")
    expect(chat.last_text).to_have_text("".join(fake.words).strip())
    chat.wait_until_idle()


def test_chats_are_listed_opened_and_gone_on_with(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("about cats")
    chat.start_chat()
    chat.ask("about dogs")
    chat.page.reload()
    expect(chat.questions.locator(".bubble")).to_have_text(["about dogs"])  # the one that was open
    expect(chat.chats).to_have_count(2)
    chat.page.get_by_role("link", name="about cats").click()
    expect(chat.questions.locator(".bubble")).to_have_text(["about cats"])
    expect(chat.page).to_have_title("about cats · neo-desktop")
    chat.ask("more")
    assert fake.nodes[fake.questions[2]["parent_id"]]["chat_id"] == "id1"
    expect(chat.chats).to_have_count(2)
    chat.page.go_back()
    expect(chat.questions.locator(".bubble")).to_have_text(["about dogs"])


def test_several_chats_answer_at_once_and_the_list_says_so(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.pause_s = ["word "] * 100_000, 0.02
    chat.send("one")
    expect(chat.last_answer).to_contain_text("word")
    chat.start_chat()
    chat.send("two")
    expect(chat.last_answer).to_contain_text("word")
    marks = chat.page.get_by_role("img", name="answering")
    expect(marks).to_have_count(2)
    chat.stop_button.click()
    expect(marks).to_have_count(1)
    chat.page.get_by_role("link", name="one").click()
    expect(chat.stop_button).to_be_visible()
    chat.stop_button.click()
    expect(marks).to_have_count(0)


def test_search_finds_titles_and_texts(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("about cats")
    chat.start_chat()
    fake.words = ["They ", "bark."]
    chat.ask("about dogs")
    chat.page.keyboard.press("Control+k")
    search = chat.page.get_by_role("searchbox", name="Search chats")
    expect(search).to_be_focused()
    search.fill("bark")
    expect(chat.chats).to_have_count(1)
    expect(chat.chats.first).to_contain_text("They bark.")
    search.fill("nothing like this")
    expect(chat.page.get_by_text("Nothing found")).to_be_visible()
    search.fill("CATS")
    expect(chat.chats).to_have_count(1)
    search.press("Enter")
    expect(chat.questions.locator(".bubble")).to_have_text(["about cats"])
    search.press("Escape")
    expect(chat.chats).to_have_count(2)


def test_rename_delete_and_undo(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("about cats")
    chat.choose("about cats", "Rename")
    title = chat.page.get_by_role("textbox", name="Title")
    expect(title).to_be_focused()
    title.fill("Felines")
    title.press("Enter")
    expect(chat.chats).to_have_text(["Felines"])
    chat.choose("Felines", "Delete")
    expect(chat.chats).to_have_count(0)
    expect(chat.answers).to_have_count(0)
    chat.button("Undo").click()
    expect(chat.chats).to_have_text(["Felines"])
    expect(chat.last_text).to_have_text(HELLO)


def test_export_and_import(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("about cats")
    with chat.page.expect_download() as download:
        chat.choose("about cats", "Export as JSON")
    assert json.loads(download.value.path().read_text())["title"] == "about cats"
    chat.button("All chats").click()
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("menuitem", name="Import chats").click()
    file = json.dumps({"chats": [{"id": "x1", "title": "from elsewhere"}]}).encode()
    chooser.value.set_files({"name": "c.json", "mimeType": "application/json", "buffer": file})
    expect(chat.page.get_by_text("1 chat imported.")).to_be_visible()
    expect(chat.chats).to_have_text(["from elsewhere", "about cats"])
    chat.button("All chats").click()
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("menuitem", name="Import chats").click()
    chooser.value.set_files({"name": "c.json", "mimeType": "application/json", "buffer": b"\xff{"})
    expect(chat.page.get_by_text("c.json is not a JSON file")).to_be_visible()


def test_two_tabs_see_the_same(chat: ChatPage, fake: FakeServer, new_page: Callable[..., ChatPage]) -> None:
    chat.ask("first")
    other = new_page(chat.page.url)
    expect(other.last_text).to_have_text(HELLO)
    fake.pause_s = 0.05
    other.send("second")
    expect(chat.questions.locator(".bubble")).to_have_text(["first", "second"])
    expect(chat.last_text).to_have_text(HELLO)
    expect(chat.answers).to_have_count(2)
    other.choose("first", "Rename")
    other.page.get_by_role("textbox", name="Title").fill("renamed there")
    other.page.keyboard.press("Enter")
    expect(chat.chats).to_have_text(["renamed there"])


def test_a_server_that_goes_and_comes_back(fake: FakeServer, new_page: Callable[..., ChatPage]) -> None:
    port = free_port()
    line = "No connection to the server."
    with serving(mount(fake.app()), port) as url:
        chat = new_page(url)
        chat.ask("first")
    expect(chat.page.locator("#connection")).to_contain_text(line)
    chat.send("second")
    expect(chat.page.get_by_role("alert").first).to_contain_text(line)
    expect(chat.box).to_have_value("second")
    with serving(mount(fake.app()), port):
        expect(chat.page.locator("#connection")).to_be_hidden()
        chat.box.press("Enter")
        expect(chat.answers).to_have_count(2)
        expect(chat.last_text).to_have_text(HELLO)
        chat.page.close()


def test_a_draft_survives_a_reload_in_its_chat(chat: ChatPage, fake: FakeServer) -> None:
    chat.box.fill("not sent yet")
    chat.page.reload()
    expect(chat.box).to_have_value("not sent yet")
    chat.ask("about cats")
    chat.box.fill("more about cats")
    chat.start_chat()
    expect(chat.box).to_have_value("")
    chat.page.get_by_role("link", name="about cats").click()
    expect(chat.box).to_have_value("more about cats")


def test_files_and_long_pastes_go_with_a_message(chat: ChatPage, fake: FakeServer) -> None:
    files = chat.page.locator("input[type=file]")
    files.set_input_files([{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"12345"}])
    chip = chat.page.locator(".composer .chip")
    expect(chip).to_contain_text("notes.txt")
    expect(chip).to_contain_text("5 characters")
    chat.page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text/plain", "long ".repeat(3000));
            document.getElementById("box").dispatchEvent(
                new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
        }"""
    )
    expect(chip).to_have_count(2)
    expect(chat.box).to_have_value("")
    files.set_input_files([{"name": "photo.png", "mimeType": "image/png", "buffer": b"x"}])
    expect(chat.page.get_by_text("Photo.png is neither text nor PDF")).to_be_visible()
    chat.problems.clear()
    chat.page.get_by_role("button", name="Remove Pasted text.txt").click()
    chat.page.reload()
    expect(chip).to_have_count(1)
    chat.ask("read this")
    expect(chat.questions.last).to_contain_text("notes.txt")
    expect(chip).to_have_count(0)
    assert len(fake.questions[0]["attachment_ids"]) == 1


def test_settings_belong_to_their_chat_and_stay(chat: ChatPage, fake: FakeServer) -> None:
    chat.set("System prompt", "Answer in rhymes.")
    for label, value in {"Temperature": "0.7", "Top-k": "40", "Seed": "0"}.items():
        chat.set(label, value)
    chat.ask("hi")
    settings = fake.chats["id1"]["settings"]
    assert {name: value for name, value in settings.items() if value is not None} == {
        "system_prompt": "Answer in rhymes.",
        "temperature": 0.7,
        "top_k": 40,
        "seed": 0,
    }
    chat.set("Max tokens", "many")
    expect(chat.page.get_by_text("Max tokens is a whole number, not “many”.")).to_be_visible()
    assert fake.chats["id1"]["settings"]["max_tokens"] is None
    chat.page.reload()
    chat.open_settings()
    expect(chat.temperature).to_have_value("0.7")
    chat.set("Temperature", "")
    expect(chat.page.get_by_role("textbox", name="System prompt")).to_have_value("Answer in rhymes.")
    chat.button("Reset to the model's own").click()
    expect(chat.page.get_by_role("textbox", name="Seed")).to_have_value("")
    expect(chat.page.get_by_text("The settings are the model's own again.")).to_be_visible()
    chat.start_chat()
    expect(chat.page.get_by_role("textbox", name="System prompt")).to_have_value("")


def test_system_prompts_as_presets(chat: ChatPage, fake: FakeServer) -> None:
    chat.set("System prompt", "Answer in rhymes.")
    chat.button("Save as preset").click()
    chat.page.get_by_role("textbox", name="Name of the preset").fill("Poet")
    chat.button("Save").last.click()
    presets = chat.page.get_by_role("combobox", name="Preset")
    expect(presets).to_have_value("Poet")
    chat.start_chat()
    presets.select_option("Poet")
    expect(chat.page.get_by_role("textbox", name="System prompt")).to_have_value("Answer in rhymes.")
    chat.ask("hi")
    assert list(fake.chats.values())[-1]["settings"]["system_prompt"] == "Answer in rhymes."
    chat.button("Delete preset").click()
    expect(presets).to_have_value("")
    assert fake.presets == {}


def test_examples_on_the_empty_page_are_asked(chat: ChatPage, fake: FakeServer) -> None:
    chat.button("Who are you?").click()
    expect(chat.questions.locator(".bubble")).to_have_text(["Who are you?"])
    expect(chat.last_text).to_have_text(HELLO)


def test_trouble_with_the_file_of_chats_is_told(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    fake.notice = "The chats could not be read: the file was damaged and set aside."
    chat = new_page(url)
    expect(chat.page.get_by_text(fake.notice)).to_be_visible()


def test_a_gpu_that_cannot_be_used_is_told_until_that_is_read(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    fake.trouble = "This computer has a GPU, but neo-desktop cannot use it: restart it."
    chat = new_page(url)
    expect(chat.page.get_by_text(fake.trouble)).to_be_visible()
    chat.button("Dismiss").click()
    expect(chat.page.get_by_text(fake.trouble)).to_be_hidden()
    chat.page.reload()
    expect(chat.page.locator("#model")).to_contain_text("fake-model")
    expect(chat.page.get_by_text(fake.trouble)).to_be_hidden()
    fake.trouble = "This computer has a GPU, but neo-desktop cannot use it: its driver is too old."
    chat.page.reload()
    expect(chat.page.get_by_text(fake.trouble)).to_be_visible()


def test_no_model_is_told_in_the_header(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    fake.health = {"status": "no model", "reason": "no model is loaded"}
    chat = new_page(url)
    expect(chat.page.locator("#model")).to_contain_text("No model loaded")
    expect(chat.page.locator("#model")).to_have_attribute("href", "#/models")
