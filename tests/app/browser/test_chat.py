"""The chat page in a real browser."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ..chat_client import ChatClient
from ..conftest import RunningServer
from ..fake_engine import ScriptedExecutor
from .conftest import ChatPage

pytestmark = pytest.mark.browser

LONG = " ".join(f"w{number}" for number in range(2000))


@pytest.fixture(scope="module")
def other(server: RunningServer, new_page: Callable[..., ChatPage]) -> ChatPage:
    """A second page, in a browser of its own."""
    return new_page(server.url)


def test_an_answer_grows_survives_a_reload_shows_on_two_pages_and_stops_from_either(
    chat: ChatPage, executor: ScriptedExecutor, other: ChatPage
) -> None:
    executor.answers = [LONG]
    executor.open.clear()
    chat.send("count")
    executor.steps.release(20)
    expect(chat.answers.last).to_contain_text("w3")
    chat.page.wait_for_url("**/?chat=*")
    other.chats.filter(has_text="count").click()
    expect(other.answers.last).to_contain_text("w3")
    chat.page.reload()
    executor.steps.release(40)
    for one in (chat, other):
        expect(one.answers.last).to_contain_text("w12")
    expect(chat.page.locator("#chats .streaming")).to_have_count(1)
    chat.stop.click()
    executor.open.set()
    for one in (other, chat):
        expect(one.page.locator("#messages")).to_contain_text("Stopped")
        expect(one.stop).to_have_count(0)
    executor.answers = ["and the end"]
    chat.option("Continue").click()
    expect(other.answers.last).to_contain_text("and the end")
    expect(chat.option("Continue")).to_have_count(0)


def test_retry_and_edit_make_variants_that_stay(chat: ChatPage, executor: ScriptedExecutor) -> None:
    executor.answers = ["first", "second", "third"]
    chat.ask("one")
    chat.page.get_by_label("Retry").last.click()
    expect(chat.answers.last).to_contain_text("second")
    chat.option("1/2").or_(chat.option("2/2")).first.click()
    expect(chat.answers.last).to_contain_text("first")
    chat.page.reload()
    expect(chat.answers.last).to_contain_text("first")
    chat.page.get_by_label("Edit").first.click()
    field = chat.page.locator("#messages textarea")
    field.fill("another question")
    chat.page.locator("#messages").get_by_label("Submit").click()
    expect(chat.questions.last).to_contain_text("another question")
    expect(chat.answers.last).to_contain_text("third")
    chat.option("Question 2/2").first.click()
    expect(chat.questions.last).to_contain_text("one")


def test_chats_are_listed_searched_renamed_deleted_and_restored(chat: ChatPage) -> None:
    before = chat.chats.count()
    for text in ("about apples", "about pears"):
        chat.page.locator("#new-chat").click()
        expect(chat.questions).to_have_count(0)
        chat.ask(text)
    expect(chat.chats).to_have_count(before + 2)
    chat.page.locator("#search textarea, #search input").fill("apples")
    expect(chat.chats).to_have_count(1)
    chat.chats.first.click()
    expect(chat.questions.last).to_contain_text("about apples")
    chat.page.locator("#search textarea, #search input").fill("")
    expect(chat.chats).to_have_count(before + 2)
    chat.page.get_by_text("This chat", exact=True).click()
    title = chat.page.locator("#title textarea, #title input")
    expect(title).to_have_value("about apples")
    title.fill("Fruit")
    title.press("Enter")
    title.blur()  # Gradio may not know the new text yet when Enter comes at once
    expect(chat.chats.filter(has_text="Fruit")).to_have_count(1)
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Markdown").click()
    assert download.value.path().read_text().startswith("# Fruit")
    row = chat.page.locator("#chats li", has_text="Fruit")
    row.hover()
    row.get_by_role("button").click()
    expect(chat.chats).to_have_count(before + 1)
    expect(chat.questions).to_have_count(0)
    chat.page.locator("#chats").get_by_role("button", name="Undo").click()
    expect(chat.chats).to_have_count(before + 2)
    expect(chat.questions.last).to_contain_text("about apples")


def test_attachments_reach_the_model_and_what_cannot_be_read_is_refused(
    chat: ChatPage, executor: ScriptedExecutor, tmp_path: Path
) -> None:
    notes, picture = tmp_path / "notes <b>.txt", tmp_path / "picture.png"
    notes.write_text("the secret is 42")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    chat.page.locator("#question input[type=file]").set_input_files([notes, picture])
    expect(chat.page.locator("#question .thumbnail-item, #question .thumbnails button").first).to_be_visible()
    chat.send("what is this?")
    expect(chat.page.get_by_text("picture.png is an image, but this model reads text only")).to_be_visible()
    chat.page.locator("#question .delete-button").last.click()
    chat.ask("what is the secret?")  # the other file is still there
    expect(chat.questions.first).to_contain_text("notes")
    assert "the secret is 42" in bytes(list(executor.prompts.values())[-1][:2000]).decode()


def test_a_file_attached_on_two_pages_belongs_to_both_questions(
    chat: ChatPage, server: RunningServer, other: ChatPage, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("the secret is 43")
    other.page.locator("#new-chat").click()
    expect(other.questions).to_have_count(0)
    pages = (chat, other)
    for one in pages:
        one.page.locator("#question input[type=file]").set_input_files([notes])
        expect(one.page.locator("#question .thumbnail-item")).to_be_visible()
    for one in pages:
        one.ask("what is the secret?")
        chat_id = one.page.url.rpartition("?chat=")[2]
        question = ChatClient(server.url).chat(chat_id)["nodes"][0]
        assert [file["text"] for file in question["attachments"]] == ["the secret is 43"]


MARKUP = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg><animate onbegin='window.hacked = 1' attributeName=x dur=1s></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src onerror=window.hacked=1&gt;'>",  # noqa: E501
    "[x](javascript:window.hacked=1)",
    "[x](data:text/html,<script>parent.hacked=1</script>)",
    "![x](http://evil.example/pixel.png)",
    "$$\\href{javascript:window.hacked=1}{x}$$",
    "$$\\htmlStyle{background:url(http://evil.example/a)}{x}$$",
    '<a href="java\nscript:window.hacked=1">x</a>',
    "```html\n<img src=x onerror=window.hacked=1>\n```",
    "`<b>` and <details open ontoggle='window.hacked=1'>",
    "<form><math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=1>",
    "{{constructor.constructor('window.hacked=1')()}} ${window.hacked=1}",
]


def test_markup_is_shown_as_text_wherever_it_comes_from(chat: ChatPage, executor: ScriptedExecutor) -> None:
    everything = "\n\n".join(MARKUP)
    executor.answers = [everything]
    chat.send(everything)
    expect(chat.figures).to_contain_text("first token after")
    for link in chat.page.locator("#messages a, #chats a").all():
        assert not re.match(r"\s*(javascript|data):", link.get_attribute("href") or "")
    for link in chat.page.locator("#messages a").all():
        assert link.get_attribute("target") == "_blank"
    assert chat.page.locator("#messages .message img").count() == 0
    expect(chat.answers.last).to_contain_text("<script>")
    expect(chat.page.locator("#chats .title").first).to_contain_text("<script>")
    assert chat.page.evaluate("window.hacked") is None


def test_thoughts_are_folded_and_code_and_formulas_are_drawn(
    chat: ChatPage, executor: ScriptedExecutor
) -> None:
    executor.answers = ["<think>let me see</think>So $$x^2$$ and\n\n```python\nx = 1\n```"]
    chat.ask("think")
    expect(chat.page.locator("#messages .katex").first).to_be_visible()
    expect(chat.page.locator("#messages pre code")).to_contain_text("x = 1")
    thought = chat.page.locator("#messages").get_by_text("Thought")
    expect(thought).to_be_visible()


def test_keys(chat: ChatPage, executor: ScriptedExecutor) -> None:
    chat.page.keyboard.press("Control+k")
    expect(chat.page.locator("#search textarea, #search input")).to_be_focused()
    chat.page.locator("#new-chat").focus()
    chat.page.keyboard.press("/")
    expect(chat.box).to_be_focused()
    executor.answers = [LONG]
    executor.open.clear()
    chat.send("one")
    expect(chat.stop).to_be_visible()
    chat.page.keyboard.press("Escape")
    executor.open.set()
    expect(chat.page.locator("#messages")).to_contain_text("Stopped")
    chat.page.keyboard.press("Control+Shift+O")
    expect(chat.questions).to_have_count(0)


FITS = """(sidebar) => {
    const box = (name) => document.querySelector(name).getBoundingClientRect();
    const question = box("#question"), pane = box("#chat");
    return question.left >= 0 && question.right <= innerWidth && question.bottom <= innerHeight
        && document.documentElement.scrollWidth <= innerWidth
        && Math.abs(pane.left - sidebar - (innerWidth - pane.right)) <= 60;
}"""


def test_the_column_is_centred_and_nothing_is_cut_off(chat: ChatPage, executor: ScriptedExecutor) -> None:
    executor.answers = ["| a | b |\n|---|---|\n| 1 | 2 |\n\n" + "word " * 200]
    chat.ask("hello")
    for width in (390, 768, 1920, 1280):
        chat.page.set_viewport_size({"width": width, "height": 800})
        sidebar = 280 if width > 768 else 0  # narrow pages show the sidebar above the chat
        chat.page.wait_for_function(FITS, arg=sidebar)


def test_settings_are_kept_and_out_of_range_ones_are_refused(
    chat: ChatPage, executor: ScriptedExecutor
) -> None:
    chat.ask("one")
    chat.page.locator("#settings .toggle-button").click()
    tokens = chat.page.locator("#max_tokens input")
    tokens.fill("2")
    tokens.blur()
    chat.page.locator("#temperature input").fill("1000")
    chat.page.locator("#temperature input").blur()
    expect(chat.page.get_by_text(re.compile("temperature must", re.IGNORECASE))).to_be_visible()
    chat.page.locator("#top_k input").fill("7")  # valid beside a refused one
    chat.page.locator("#top_k input").blur()
    expect(chat.page.get_by_text(re.compile("temperature must", re.IGNORECASE))).to_have_count(2)
    expect(chat.page.locator("#temperature input")).to_have_value("1000")
    chat.page.reload()
    chat.page.locator("#settings .toggle-button").click()
    expect(tokens).to_have_value("2")
    expect(chat.page.locator("#top_k input")).to_have_value("7")
    expect(chat.page.locator("#temperature input")).to_have_value("")
    executor.answers = ["abcdef"]
    chat.ask("two")
    assert (executor.seen[-1].params.max_tokens, executor.seen[-1].params.top_k) == (2, 7)
