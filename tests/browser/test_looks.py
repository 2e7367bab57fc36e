"""How it looks and how it is handled without a mouse: widths, colours, keys."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from .chat_page import ChatPage
from .fake_server import FakeServer

pytestmark = pytest.mark.browser

WIDE = """Text with a_very_long_word_without_any_place_to_break_it_that_goes_on_and_on_and_on_and_on_and_on.

```python
a_line = "of code that is longer than a phone is wide, and then some more, and then some more again and again"
```

| a wide table | with many | columns that | do not fit | on a phone | at all |
|---|---|---|---|---|---|
| 1 | 2 | 3 | 4 | 5 | 6 |

$$
a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s + t + u + v + w + x + y + z = 1
$$
"""


@pytest.mark.parametrize("width", [768, 1280, 1920])
def test_the_chat_stands_in_the_middle(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage], width: int
) -> None:
    chat = new_page(url, viewport={"width": width, "height": 800})
    fake.words = ["A line.\n\n"] * 100  # long enough for a scroll bar
    chat.ask("hi")
    main = chat.page.locator("#main").bounding_box()
    assert main is not None
    for part in (".messages", ".composer"):
        box = chat.page.locator(part).bounding_box()
        assert box is not None
        left, right = box["x"] - main["x"], main["x"] + main["width"] - box["x"] - box["width"]
        assert left == pytest.approx(right, abs=1), part
        assert box["width"] <= 800


def test_a_phone_shows_the_conversation_without_scrolling_sideways(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    fake.words = [WIDE]
    chat = new_page(url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    chat.box.fill("x" * 300)
    chat.send_button.click()
    chat.wait_until_idle()
    expect(chat.box).to_be_in_viewport()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert chat.scroller.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    sizes = chat.page.locator("textarea, input").evaluate_all(
        "es => es.map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 16  # below 16, phones zoom in
    expect(chat.new_button).not_to_be_in_viewport()
    chat.button("Toggle sidebar").click()
    expect(chat.new_button).to_be_in_viewport()
    chat.start_chat()
    expect(chat.new_button).not_to_be_in_viewport()
    chat.button("Settings").click()
    expect(chat.temperature).to_be_in_viewport()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 360


def _contrast(page: Page, selector: str) -> float:
    """WCAG's contrast of a text and what lies under it."""
    ratio: float = page.locator(selector).first.evaluate(
        """element => {
            const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
            const paint = (colour) => (context.fillStyle = colour, context.fillRect(0, 0, 1, 1));
            const light = () => {
                const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(
                    v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const grounds = [];
            for (let at = element; at; at = at.parentElement)
                grounds.unshift(getComputedStyle(at).backgroundColor);
            paint("white");
            grounds.forEach(paint);
            const ground = light();
            paint(getComputedStyle(element).color);
            const [low, high] = [ground, light()].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
        }"""
    )
    return ratio


TEXTS = [
    ".bubble",
    ".markdown p",
    ".markdown a",
    ".markdown code",
    ".markdown blockquote",
    ".markdown th",
    ".code-head span",
    "pre .k",
    "pre .s2",
    "pre .c1",
    "pre .mi",
    "pre .nf",
    "pre .nb",
    ".figures",
    ".failure span",
    "#model .rest",
    "#model strong",
    ".day",
    "#chats a",
    "#sidebar nav a",
    ".button.primary",
    ".gauge-text",
    "#settings .muted",
    "#settings label",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_under_them(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage], scheme: str
) -> None:
    code = '```python\ndef f(x):\n    return len("a") + 1  # why\n```'
    fake.words = [f"A [link](https://example.org), `code`.\n\n> quote\n\n|a|\n|-|\n|b|\n\n{code}", ""]
    chat = new_page(url, color_scheme=scheme)
    chat.ask("hi")
    fake.fails_after = 0
    chat.send("again")
    chat.open_settings()
    low = {text: round(_contrast(chat.page, text), 2) for text in TEXTS if _contrast(chat.page, text) < 4.5}
    assert low == {}


def test_the_theme_is_chosen_and_remembered(chat: ChatPage) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = chat.page.evaluate(ground)
    chat.button("Theme: as the system").click()
    chat.button("Theme: light").click()
    assert chat.page.evaluate(ground) != light
    chat.page.reload()
    expect(chat.button("Theme: dark")).to_be_visible()
    assert chat.page.evaluate(ground) != light
    chat.button("Theme: dark").click()
    assert chat.page.evaluate(ground) == light


def test_everything_goes_by_keyboard(chat: ChatPage, fake: FakeServer) -> None:
    press = chat.page.keyboard.press
    expect(chat.box).to_be_focused()
    chat.page.keyboard.type("about cats")
    press("Shift+Enter")
    chat.page.keyboard.type("and dogs")
    press("Enter")
    chat.wait_until_idle()
    assert fake.questions[0]["text"] == "about cats\nand dogs"
    press("Control+Shift+O")
    expect(chat.answers).to_have_count(0)
    expect(chat.box).to_be_focused()
    chat.page.keyboard.type("second chat")
    press("Enter")
    chat.wait_until_idle()
    press("Alt+ArrowDown")
    expect(chat.questions).to_contain_text(["about cats"])
    press("Alt+ArrowUp")
    expect(chat.questions).to_contain_text(["second chat"])

    press("Control+,")
    expect(chat.page.get_by_role("textbox", name="System prompt")).to_be_focused()
    press("Escape")
    expect(chat.temperature).to_be_hidden()
    press("?")
    expect(chat.page.get_by_role("dialog")).to_contain_text("Search chats")
    press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    press("/")
    expect(chat.box).to_be_focused()

    # The list: down from the search, rename by F2, menu by Enter, delete and back.
    press("Control+k")
    press("ArrowDown")
    expect(chat.chats.first).to_be_focused()
    press("F2")
    chat.page.keyboard.type("Renamed")
    press("Enter")
    expect(chat.chats.first).to_have_text("Renamed")
    expect(chat.chats.first).to_be_focused()
    press("Tab")
    press("Enter")
    expect(chat.page.get_by_role("menuitem", name="Rename")).to_be_focused()
    press("ArrowUp")
    press("Enter")
    expect(chat.chats).to_have_count(1)
    chat.button("Undo").press("Enter")
    expect(chat.chats).to_have_count(2)


def test_a_slow_server_takes_no_focus_away(chat: ChatPage, fake: FakeServer) -> None:
    """A new title is stored, and the list drawn anew, while its menu is open already."""
    chat.ask("about cats")
    held: list[Route] = []

    def hold(route: Route) -> None:
        if route.request.method == "PATCH":
            held.append(route)
        else:
            route.continue_()

    chat.page.route("**/api/chats/*", hold)
    chat.chats.first.focus()
    chat.page.keyboard.press("F2")
    chat.page.keyboard.type("Renamed")
    with chat.page.expect_request(lambda request: request.method == "PATCH"):
        chat.page.keyboard.press("Enter")
    expect(chat.chats.first).to_be_focused()
    chat.page.keyboard.press("Tab")
    chat.page.keyboard.press("Enter")
    rename = chat.page.get_by_role("menuitem", name="Rename")
    expect(rename).to_be_focused()
    with chat.page.expect_response(lambda response: response.request.method == "PATCH"):
        held[0].continue_()
    chat.page.unroute("**/api/chats/*")
    expect(chat.chats.first).to_have_text("Renamed")
    expect(rename).to_be_focused()


def test_every_control_has_a_name_and_icons_their_size(chat: ChatPage, fake: FakeServer) -> None:
    chat.ask("hi")
    chat.open_settings()
    nameless = chat.page.locator("button, a[href], input:not([type=file]), textarea, select").evaluate_all(
        """es => es.filter(e => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
            .map(e => e.outerHTML)"""
    )
    assert nameless == []
    sizes = chat.page.locator("svg.icon").evaluate_all("es => es.map(e => e.getBoundingClientRect().width)")
    assert max(sizes) <= 20


def test_long_titles_names_and_errors_stay_inside(
    fake: FakeServer, url: str, new_page: Callable[..., ChatPage]
) -> None:
    fake.health = {"status": "ok", "model": "a-model-with-a-name-" * 20}
    fake.refusal = (400, "x" * 2000)
    chat = new_page(url, viewport={"width": 390, "height": 700})
    chat.send("title " + "y" * 500)
    expect(chat.page.get_by_role("alert").first).to_be_visible()
    expect(chat.send_button).to_be_in_viewport()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 390
    chat.problems.clear()
