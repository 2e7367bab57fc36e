"""One chat as its user sees it, in a real browser in front of a fake server."""

import re
from collections.abc import Callable

import pytest
from fastapi import FastAPI, Request, Response
from playwright.sync_api import expect

from .chat_page import ChatPage
from .conftest import free_port, serving
from .fake_server import FakeServer

pytestmark = pytest.mark.browser

HELLO = "Hello from the fake server."
ENDLESS = [f"w{number} " for number in range(100_000)]


def test_answer_grows_word_by_word_and_ends_with_its_figures(chat: ChatPage, fake: FakeServer) -> None:
    fake.pause_s = 0.3
    expect(chat.page).to_have_title("neo-desktop")
    expect(chat.page.get_by_text("fake-model · 4,096 tokens of context")).to_be_visible()
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("Hello")
    expect(chat.last_answer).not_to_contain_text("server.")
    chat.wait_until_idle()
    expect(chat.last_text).to_have_text(HELLO)
    expect(chat.last_answer).to_contain_text("first token after 0.12 s · 31.2 tokens/s · 5 tokens")
    expect(chat.page.get_by_role("meter", name="Context used")).to_have_attribute("aria-valuemax", "4096")


def test_a_question_is_sent_and_shown_as_it_was_typed(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("first")
    text = "  second\n    *indented* <b>"
    chat.send(text)
    expect(chat.questions.last.locator(".bubble")).to_have_text(text, use_inner_text=True)
    assert fake.questions[1]["text"] == text
    first_answer = next(node for node in fake.nodes.values() if node["text"] == HELLO)
    assert fake.questions[1]["parent_id"] == first_answer["id"]


def test_empty_messages_are_ignored(chat: ChatPage, fake: FakeServer) -> None:
    chat.send("")
    chat.send("  \n ")
    expect(chat.send_button).to_be_disabled()
    chat.ask("hi")
    assert [body["text"] for body in fake.questions] == ["hi"]


def test_typing_ahead_waits_for_the_answer(chat: ChatPage, fake: FakeServer) -> None:
    fake.words = ENDLESS
    chat.send("first")
    expect(chat.last_answer).to_contain_text("w5")
    chat.send("second")
    expect(chat.box).to_have_value("second")
    fake.words = ["Short."]
    chat.stop_button.click()
    expect(chat.last_answer).to_contain_text("stopped")
    assert len(fake.questions) == 1
    chat.box.press("Enter")
    expect(chat.answers).to_have_count(2)
    expect(chat.box).to_have_value("")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_was_said_and_it_can_go_on(chat: ChatPage, fake: FakeServer, how: str) -> None:
    fake.words = ENDLESS
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("w5")
    if how == "button":
        chat.stop_button.click()
    else:
        chat.page.keyboard.press("Escape")
    expect(chat.last_answer).to_contain_text("stopped · first token after")
    expect(chat.send_button).to_be_visible()
    expect(chat.box).to_be_focused()
    fake.words = ["and the end."]
    chat.button("Continue").click()
    expect(chat.last_text).to_contain_text(re.compile(r"^w0 w1 .* and the end\.\s*$"))
    expect(chat.button("Continue")).to_have_count(0)
    expect(chat.answers).to_have_count(1)


def test_stop_while_the_prompt_is_read(chat: ChatPage, fake: FakeServer) -> None:
    fake.first_pause_s = 600
    chat.send("hi")
    expect(chat.last_answer).to_have_text("waiting for the first token")
    chat.stop_button.click()
    expect(chat.last_answer).to_contain_text("stopped before the first token")
    fake.first_pause_s = 0
    chat.retry_button.click()
    expect(chat.last_text).to_have_text(HELLO)


def test_an_answer_cut_at_the_limit_says_so_and_can_go_on(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.finish_reason = ["```python\n", "x = 1"], "length"
    chat.ask("hi")
    expect(chat.last_answer.locator("p.figures")).to_contain_text("cut at the token limit")
    expect(chat.last_answer.locator("pre")).to_have_text("x = 1")
    expect(chat.button("Continue")).to_be_visible()


def test_another_answer_is_kept_beside_the_first(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("first")
    chat.ask("second")
    fake.words = ["Another ", "answer."]
    chat.retry_button.click()
    expect(chat.last_text).to_have_text("Another answer.")
    expect(chat.answers).to_have_count(2)
    expect(chat.last_answer).to_contain_text("2/2")
    chat.button("Previous variant").click()
    expect(chat.last_text).to_have_text(HELLO)
    expect(chat.last_answer).to_contain_text("1/2")
    chat.page.reload()
    expect(chat.last_answer).to_contain_text("1/2")  # the server remembers which one was chosen


def test_an_edited_question_starts_a_branch_and_the_old_one_stays(chat: ChatPage, fake: FakeServer) -> None:
    for text in ("first", "second", "third"):
        chat.ask(text)
    chat.questions.nth(1).hover()
    chat.button("Edit").nth(1).click()
    field = chat.page.get_by_role("textbox", name="Edit your question")
    expect(field).to_be_focused()
    field.fill("changed")
    chat.button("Submit").click()
    expect(chat.answers).to_have_count(2)
    expect(chat.questions.locator(".bubble")).to_have_text(["first", "changed"])
    chat.wait_until_idle()
    chat.questions.nth(1).hover()
    chat.button("Previous variant").click()
    expect(chat.questions.locator(".bubble")).to_have_text(["first", "second", "third"])
    # Escape leaves a question as it was.
    chat.box.press("ArrowUp")
    expect(field).to_have_value("third")
    field.fill("not this")
    field.press("Escape")
    expect(chat.questions.locator(".bubble")).to_have_text(["first", "second", "third"])


def test_a_refusal_is_told_and_the_question_stays_in_the_box(chat: ChatPage, fake: FakeServer) -> None:
    fake.refusal = (503, "the queue is <full>: *1,000* requests wait")
    chat.send("too much")
    expect(chat.page.get_by_role("alert").first).to_have_text("The queue is <full>: *1,000* requests wait.")
    expect(chat.box).to_have_value("too much")
    fake.refusal = None
    chat.problems.clear()
    chat.box.press("Enter")
    expect(chat.last_text).to_have_text(HELLO)
    expect(chat.page.get_by_text("The queue is")).to_have_count(0)
    expect(chat.box).to_have_value("")


def test_a_failure_is_shown_under_what_was_said(chat: ChatPage, fake: FakeServer) -> None:
    fake.fails_after = 2
    chat.send("hi")
    expect(chat.last_text).to_have_text("Hello from")
    expect(chat.last_answer.get_by_role("alert")).to_have_text("Out of memory.")
    expect(chat.send_button).to_be_visible()


def test_thoughts_fold_away_under_their_duration(chat: ChatPage, fake: FakeServer) -> None:
    fake.thoughts = ["Hmm, ", "a greeting."]
    chat.ask("hi")
    thought = chat.page.get_by_text("a greeting.")
    expect(thought).to_be_hidden()
    chat.page.get_by_text("Thought for 3.2 s").click()
    expect(thought).to_be_visible()
    expect(chat.last_text).to_have_text(HELLO)


def test_copying(fake: FakeServer, url: str, new_page: Callable[..., ChatPage]) -> None:
    fake.words = ["Use **this**:\n\n", "```sh\nls -l\n```"]
    chat = new_page(url, permissions=["clipboard-read", "clipboard-write"])
    chat.ask("hi")
    chat.button("Copy message").last.click()
    expect(chat.button("Copied")).to_be_visible()
    box = chat.page.get_by_role("textbox", name="Message", exact=True)
    box.press("Control+v")
    expect(box).to_have_value("Use **this**:\n\n```sh\nls -l\n```")
    box.fill("")
    copy_code = chat.last_text.get_by_role("button")
    expect(copy_code).to_have_accessible_name("Copy code")
    copy_code.dblclick()
    expect(copy_code).to_have_accessible_name("Copied")
    box.press("Control+v")
    expect(box).to_have_value("ls -l\n")
    expect(copy_code).to_have_accessible_name("Copy code")
    expect(copy_code.locator(".icon-copy")).to_be_visible()


def test_markup_anywhere_cannot_call_out_or_run(chat: ChatPage, fake: FakeServer) -> None:
    calls: list[str] = []
    elsewhere = FastAPI()

    @elsewhere.get("/{path:path}")
    def called(request: Request) -> Response:
        calls.append(str(request.url))
        return Response()

    with serving(elsewhere, free_port()) as other:
        evil = f'<img src="{other}/html.png" onerror="window.ran = true">'
        fake.words = [
            f"![a]({other}/markdown.png) ",
            evil,
            f"<script>fetch('{other}/script'); window.ran = true</script> ",
            f'```"><img src={other}/code.png>\nx\n```\n\n',
            "[click](javascript:window.ran=true) done.",
        ]
        fake.thoughts = [evil]
        chat.page.locator("input[type=file]").set_input_files(
            {"name": f"{evil}.txt", "mimeType": "text/plain", "buffer": b"x"}
        )
        expect(chat.page.locator(".chip")).to_contain_text("<img")
        chat.ask(evil)
        expect(chat.last_answer).to_contain_text("done.")
        chat.choose("<img", "Rename")
        field = chat.page.get_by_role("textbox", name="Title")
        field.fill(f"title {evil}")
        field.press("Enter")
        expect(chat.chats.first).to_contain_text("title <img")
        chat.page.get_by_role("searchbox").fill("html.png")
        expect(chat.chats.first).to_contain_text("onerror")
        chat.choose("title", "Delete")
        expect(chat.page.get_by_text("Deleted “title <img")).to_be_visible()
        assert chat.page.evaluate("window.ran") is None
        assert chat.page.locator("img").count() == 1  # the page's own
    assert calls == []


def test_the_rules_stop_scripts_even_if_markup_came_through(
    chat: ChatPage, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "_say", staticmethod(_say_unclean))
    fake.words = ["<img src=x onerror='window.ran = true'>", " done."]
    chat.expected_problems = r"Content Security Policy|404 .*/x$"
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("done.")
    image = chat.page.locator(".markdown img")
    expect(image).to_have_js_property("complete", True)  # it failed to load, and the handler had its chance
    assert chat.page.evaluate("window.ran") is None


def _say_unclean(node: dict[str, object], text: str) -> None:
    node["text"], node["blocks"] = text, [f"<p>{text}</p>"]


def test_scrolling_up_is_never_undone_while_text_streams(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.pause_s = [f"line {number}\n\n" for number in range(100_000)], 0.002
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("line 60")
    distance = "e => e.scrollHeight - e.clientHeight - e.scrollTop"
    assert chat.scroller.evaluate(distance) < 40  # it follows
    # Within one task, so that text is drawn between the scroll and the browser's event for it.
    top = chat.scroller.evaluate("e => (e.scrollTop -= 40)")
    seen = chat.last_text.locator(".block").count()
    expect(chat.last_text.locator(".block").nth(seen + 20)).to_be_attached()
    assert chat.scroller.evaluate("e => e.scrollTop") == pytest.approx(top, abs=1)
    chat.button("Jump to latest").click()
    expect(chat.button("Jump to latest")).to_be_hidden()
    seen = chat.last_text.locator(".block").count()
    expect(chat.last_text.locator(".block").nth(seen + 20)).to_be_attached()
    assert chat.scroller.evaluate(distance) < 40
    chat.stop_button.click()
    expect(chat.send_button).to_be_visible()
