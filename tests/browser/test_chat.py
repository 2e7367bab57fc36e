"""The chat as its user sees it, in a real browser in front of a fake server."""

import re
from collections.abc import Callable

import pytest
from fastapi import FastAPI, Request, Response
from playwright.sync_api import expect

from neo_desktop.ui.app import mount

from .chat_page import ChatPage
from .conftest import free_port, serving
from .fake_server import FakeServer

pytestmark = pytest.mark.browser

HELLO = "Hello from the fake server."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_answer_grows_word_by_word_and_ends_with_its_figures(chat: ChatPage, fake: FakeServer) -> None:
    fake.pause_s = 0.3
    expect(chat.page).to_have_title("neo-desktop")
    expect(chat.page.get_by_text("fake-model · 4,096 tokens of context")).to_be_visible()
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("Hello")
    expect(chat.last_answer).not_to_contain_text("server.")
    chat.wait_until_idle()
    expect(chat.last_answer).to_contain_text(HELLO)
    expect(chat.last_answer).to_contain_text(
        re.compile(r"first token after \d+\.\d\d s · \d+\.\d tokens/s · 5 tokens$")
    )


def test_history_is_what_was_said_and_nothing_of_the_page(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("first")
    chat.ask("  second\n    indented")
    assert fake.bodies[1]["messages"] == [user("first"), assistant(HELLO), user("  second\n    indented")]


def test_unset_settings_are_not_sent(chat: ChatPage, fake: FakeServer) -> None:
    chat.open_settings()  # looking at them sets none
    chat.ask("hi")
    assert fake.bodies == [
        {
            "model": "fake-model",
            "messages": [user("hi")],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert fake.authorization == "Bearer secret"


def test_system_prompt_and_settings_reach_the_server(chat: ChatPage, fake: FakeServer) -> None:
    settings = {
        "Temperature": ("temperature", 0.7),
        "Top-p": ("top_p", 0.9),
        "Top-k": ("top_k", 40),
        "Min-p": ("min_p", 0.05),
        "Repetition penalty": ("repetition_penalty", 1.1),
        "Max tokens": ("max_tokens", 64),
        "Seed": ("seed", 0),
    }
    chat.set("System prompt", "Answer in rhymes.")
    for label, (_, value) in settings.items():
        chat.set(label, str(value))
    chat.ask("hi")
    body = fake.bodies[0]
    assert {name: body[name] for name, _ in settings.values()} == dict(settings.values())
    assert body["messages"] == [{"role": "system", "content": "Answer in rhymes."}, user("hi")]


def test_a_cleared_setting_is_unset_again(chat: ChatPage, fake: FakeServer) -> None:
    chat.set("Temperature", "0")
    chat.ask("hi")
    chat.set("Temperature", "")
    chat.ask("again")
    assert fake.bodies[0]["temperature"] == 0
    assert "temperature" not in fake.bodies[1]


def test_setting_that_is_no_number_is_refused(chat: ChatPage, fake: FakeServer) -> None:
    chat.set("Max tokens", "many")
    chat.send("hi")
    expect(chat.last_answer).to_have_text(
        "Max tokens is a whole number, not 'many': change it in the settings."
    )
    chat.set("Max tokens", "")
    chat.ask("hi")
    assert len(fake.bodies) == 1


def test_stop_disconnects_and_keeps_what_was_said(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.pause_s = [f"w{i} " for i in range(1000)], 0.02
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("w5")
    chat.stop_button.click()
    expect(chat.last_answer).to_contain_text(re.compile(r"stopped · first token after \d+\.\d\d s$"))
    expect(chat.send_button).to_be_visible()
    assert fake.disconnected.wait(timeout=10)

    partial = chat.last_answer.locator("p").first.inner_text()
    fake.reset()
    chat.ask("go on")
    assert fake.bodies[0]["messages"] == [user("hi"), assistant(partial), user("go on")]


def test_stop_while_the_prompt_is_read(chat: ChatPage, fake: FakeServer) -> None:
    fake.first_pause_s = 600
    chat.send("hi")
    expect(chat.last_answer).to_have_text("waiting for the first token")
    chat.stop_button.click()
    expect(chat.last_answer).to_have_text("stopped before the first token")
    assert fake.disconnected.wait(timeout=10)
    fake.reset()
    chat.retry_button.click()
    expect(chat.last_answer).to_contain_text(HELLO)


def test_closing_the_page_disconnects(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.pause_s = ["word "] * 100_000, 0.02
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("word")
    chat.page.close()
    assert fake.disconnected.wait(timeout=20)


def test_regenerate_asks_the_same_again(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("first")
    chat.ask("second")
    fake.words = ["Another ", "answer."]
    chat.retry_button.click()
    expect(chat.last_answer).to_contain_text("Another answer.")
    chat.wait_until_idle()
    assert fake.bodies[2] == fake.bodies[1]
    expect(chat.answers).to_have_count(2)


def test_edited_question_is_answered_anew_and_drops_what_followed(chat: ChatPage, fake: FakeServer) -> None:
    for text in ("first", "second", "third"):
        chat.ask(text)
    chat.page.get_by_role("button", name="Edit").nth(1).click()
    chat.page.locator("#chat textarea").fill("changed")
    chat.page.get_by_role("button", name="Submit").click()
    expect(chat.answers).to_have_count(2)
    chat.wait_until_idle()
    assert fake.bodies[3]["messages"] == [user("first"), assistant(HELLO), user("changed")]
    expect(chat.questions).to_have_text(["first", "changed"])


def test_empty_messages_are_ignored(chat: ChatPage, fake: FakeServer) -> None:
    chat.send("")
    chat.send("  \n ")
    chat.page.wait_for_timeout(500)  # a message sent before the last one is dealt with stays in the box
    expect(chat.questions).to_have_count(0)
    chat.ask("hi")
    assert [body["messages"] for body in fake.bodies] == [[user("hi")]]


def test_typing_ahead_waits_for_the_answer(chat: ChatPage, fake: FakeServer) -> None:
    fake.pause_s = 0.3
    chat.send("first")
    expect(chat.last_answer).to_contain_text("Hello")
    chat.send("second")
    chat.wait_until_idle()
    assert len(fake.bodies) == 1
    expect(chat.box).to_have_value("second")
    chat.box.press("Enter")
    expect(chat.answers).to_have_count(2)
    chat.wait_until_idle()
    assert fake.bodies[1]["messages"] == [user("first"), assistant(HELLO), user("second")]


@pytest.mark.parametrize(
    ("status", "message"),
    [(503, "The queue is full: 1,000 requests wait."), (400, "The prompt has *5000* tokens, <max> 4096.")],
)
def test_refusal_is_shown_and_the_page_goes_on(
    chat: ChatPage, fake: FakeServer, status: int, message: str
) -> None:
    fake.refusal = (status, message)
    chat.send("too much")
    expect(chat.last_answer).to_have_text(f"{message} (HTTP {status})")
    fake.refusal = None
    chat.ask("hi")
    assert fake.bodies[1]["messages"] == [user("hi")]


def test_error_in_the_stream_is_shown_under_what_was_said(chat: ChatPage, fake: FakeServer) -> None:
    fake.breaks_after = 2
    chat.send("hi")
    expect(chat.last_answer).to_contain_text("Hello from")
    expect(chat.last_answer).to_contain_text("The server broke off: out of memory")
    expect(chat.send_button).to_be_visible()


def test_missing_server_is_told(new_page: Callable[..., ChatPage]) -> None:
    nowhere, port = f"http://127.0.0.1:{free_port()}/v1", free_port()
    with serving(mount(FastAPI(), nowhere, None), port) as url:
        chat = new_page(url)
        expect(chat.page.locator("#model")).to_contain_text(f"No connection to the server at {nowhere}.")
        chat.send("hi")
        expect(chat.last_answer).to_contain_text(f"No connection to the server at {nowhere}.")
        expect(chat.send_button).to_be_visible()
        chat.page.close()


def test_answer_cut_inside_a_code_block_keeps_its_figures_readable(chat: ChatPage, fake: FakeServer) -> None:
    fake.words, fake.finish_reason = ["```python\n", "x = 1"], "length"
    chat.ask("hi")
    expect(chat.last_answer.locator("p.figures")).to_contain_text("2 tokens · cut at the token limit")
    expect(chat.last_answer.locator("pre")).to_contain_text("x = 1")


def test_thoughts_fold_away_and_are_not_sent_back(chat: ChatPage, fake: FakeServer) -> None:
    fake.words = ["<think>", "Hmm, ", "a greeting.", "</think>\n\n", "Good ", "day."]
    chat.ask("hi")
    expect(chat.page.get_by_text("Reasoning")).to_be_visible()
    chat.ask("again")
    assert fake.bodies[1]["messages"] == [user("hi"), assistant("Good day."), user("again")]


def test_chats_are_kept_opened_and_deleted(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("about cats")
    chat.new_button.click()
    expect(chat.answers).to_have_count(0)
    chat.ask("about dogs")
    chat.page.reload()
    expect(chat.chats).to_have_count(2)
    chat.page.get_by_text("about cats").click()
    expect(chat.questions).to_have_text(["about cats"])
    chat.ask("more")
    assert fake.bodies[2]["messages"] == [user("about cats"), assistant(HELLO), user("more")]
    expect(chat.chats).to_have_count(2)
    chat.page.get_by_role("button", name="Delete this chat").click()
    expect(chat.answers).to_have_count(0)
    expect(chat.chats).to_have_count(1)


def test_copying_an_answer_leaves_its_figures_out(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    chat = new_page(url, permissions=["clipboard-read", "clipboard-write"])
    chat.ask("hi")
    chat.page.get_by_role("button", name="Copy message").last.click()
    chat.page.wait_for_function(f"navigator.clipboard.readText().then(text => text === '{HELLO}')")


def test_markup_in_an_answer_cannot_call_out_or_run(chat: ChatPage, fake: FakeServer) -> None:
    calls: list[str] = []
    elsewhere = FastAPI()

    @elsewhere.get("/{path:path}")
    def called(request: Request) -> Response:
        calls.append(str(request.url))
        return Response()

    with serving(elsewhere, free_port()) as other:
        fake.words = [
            f"![a]({other}/markdown.png) ",
            f'<img src="{other}/html.png" onerror="window.ran = true"> ',
            f"<script>fetch('{other}/script')</script> ",
            "$$e = mc^2$$ and `code` done.",
        ]
        chat.ask("hi")
        expect(chat.last_answer).to_contain_text("done.")
        chat.page.wait_for_load_state("networkidle")
        assert chat.page.evaluate("window.ran") is None
    assert calls == []


def test_narrow_window_shows_the_conversation(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    chat = new_page(url, viewport={"width": 360, "height": 640})
    chat.ask("hi")
    expect(chat.last_answer).to_be_in_viewport()
    expect(chat.box).to_be_in_viewport()
    expect(chat.new_button).not_to_be_in_viewport()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 360
    chat.page.get_by_role("button", name="Toggle Sidebar").click()
    chat.new_button.click()
    expect(chat.new_button).not_to_be_in_viewport()
    expect(chat.answers).to_have_count(0)
