"""The page as a user handles it."""

import re
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, expect


class ChatPage:
    """What a user sees and does; remembers every host that the page asks for anything."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(15_000)
        self.hosts: set[str] = set()
        self.problems: list[str] = []
        self.expected_problems: str | None = None  # a pattern; the browser tells of them at any time
        page.on("request", lambda request: self._note_host(request.url))
        page.on("pageerror", lambda error: self._note_problem(str(error)))
        page.on("response", self._note_failure)
        page.on("console", self._note_message)
        self.box = page.get_by_role("textbox", name="Message", exact=True)
        self.send_button = page.get_by_role("button", name="Send", exact=True)
        self.stop_button = page.get_by_role("button", name="Stop", exact=True)
        self.new_button = page.get_by_role("button", name="New chat", exact=True)
        self.retry_button = page.get_by_role("button", name="Retry").last
        self.temperature = page.get_by_role("textbox", name="Temperature")
        self.answers = page.get_by_test_id("bot")
        self.questions = page.get_by_test_id("user")
        self.last_answer = self.answers.last
        self.last_text = self.last_answer.locator(".markdown").last
        self.chats = page.get_by_role("list", name="Chats").get_by_role("link")
        self.scroller = page.locator(".scroller")

    def _note_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob"):
            self.hosts.add(parts.hostname or url)

    def _note_failure(self, response: Any) -> None:
        if response.status >= 400:
            self._note_problem(f"{response.status} {response.url}")

    def _note_message(self, message: Any) -> None:
        if "Content Security Policy" in message.text:
            self._note_problem(message.text)

    def _note_problem(self, text: str) -> None:
        if self.expected_problems is None or not re.search(self.expected_problems, text):
            self.problems.append(text)

    def open(self, url: str) -> None:
        self.page.goto(url)
        expect(self.send_button).to_be_visible()

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> None:
        """Send, and wait until the answer is complete."""
        self.send(text)
        expect(self.questions.last).to_contain_text(text)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        expect(self.last_answer).to_contain_text(re.compile(r"first token after|stopped|memory"))
        expect(self.send_button).to_be_visible()

    def start_chat(self) -> None:
        self.new_button.click()
        expect(self.answers).to_have_count(0)

    def open_settings(self) -> None:
        if not self.temperature.is_visible():
            self.page.get_by_role("button", name="Settings", exact=True).click()
        expect(self.temperature).to_be_visible()

    def set(self, label: str, value: str) -> None:
        """Change a setting."""
        self.open_settings()
        field = self.page.get_by_role("textbox", name=label)
        field.fill(value)
        field.blur()

    def choose(self, chat: str, action: str) -> None:
        """Choose an entry of a chat's menu."""
        row = self.page.get_by_role("list", name="Chats").get_by_role("listitem").filter(has_text=chat)
        row.hover()
        row.get_by_role("button").click()
        self.page.get_by_role("menuitem", name=action).click()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name)
