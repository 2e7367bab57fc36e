"""The chat view: questions and answers, and the box below them."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.application import PageServices
from neo_desktop.app.chats.messages import Chat, Message, NotFoundError, Settings, branch, used_tokens
from neo_desktop.app.chats.tool_calls import DECISIONS
from neo_desktop.app.errors import NoModelError
from neo_desktop.app.news import chat_topic, text_topic
from neo_desktop.engine.loading import BUILTIN_NAME
from neo_desktop.engine.options import BUILTIN
from neo_desktop.ui.following import QUIET, is_read
from neo_desktop.ui.html import panel, tag
from neo_desktop.ui.models import offer_html
from neo_desktop.ui.refusals import telling
from neo_desktop.ui.rows import WINDOW, rows_of

_numbers = itertools.count()
FRAME_S = 1 / 15  # an answer is drawn at most this often
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
BUILTIN_EXAMPLES = (
    "What can neo-desktop do?",
    "How do I load a bigger model?",
    "How do I use you from Python?",
    "What is a KV cache?",
)
EXAMPLES = (
    "Explain how a refrigerator works, step by step.",
    "Write a Python function that finds the longest word in a text, with tests.",
    "Compare three ways to learn a language in a table.",
    "Help me write a friendly message that declines an invitation.",
)


@dataclass(slots=True)
class Look:
    """The state of one open page, which its events share."""

    chat_id: str | None = None
    query: str = ""
    window: int = WINDOW  # messages
    message_ids: list[str] = field(default_factory=list)  # of the rows as drawn
    deleted: tuple[str, str] | None = None  # id and title of the chat that can be restored
    topic: str = field(default_factory=lambda: f"look {next(_numbers)}")  # told when any of this changes

    def __deepcopy__(self, _: object) -> "Look":
        """Return the look of another page: Gradio copies the first one for each session."""
        return Look()


def read_upload(path: str) -> bytes:
    """Return what an uploaded file holds. NotFoundError: another start of the program has removed it."""
    file = Path(path)
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"the upload of {file.name} is gone: attach it again") from None


class ChatView:
    """The components of a chat, and what their events do."""

    def __init__(self, services: PageServices) -> None:
        self.services = services
        self.chats = services.chats
        self.look = gr.State(Look())
        is_builtin = services.host.name in (BUILTIN, BUILTIN_NAME)
        self.header = panel(elem_id="model-line")
        self.earlier = gr.Button("Earlier messages", visible=False, size="sm", elem_id="earlier")
        self.bot = gr.Chatbot(
            elem_id="messages",
            show_label=False,
            container=False,
            height=None,
            editable="user",
            buttons=["copy"],
            layout="bubble",
            latex_delimiters=LATEX,
            feedback_options=None,
            group_consecutive_messages=True,
            placeholder="## What can I do for you?",
            examples=[{"text": text} for text in (BUILTIN_EXAMPLES if is_builtin else EXAMPLES)],
        )
        self.foot = panel(elem_id="figures")
        self.box = gr.MultimodalTextbox(
            elem_id="question",
            show_label=False,
            container=False,
            placeholder="Message",
            sources=["upload"],
            file_count="multiple",
            autofocus=True,
            max_plain_text_length=20_000,
            html_attributes=gr.InputHTMLAttributes(spellcheck=True),
        )
        self.tick = gr.Textbox(visible=False)  # differs where `draw` has something to do
        self.address = gr.Textbox(visible=False)  # the query of the page's address

    def connect(self) -> None:
        inputs = [self.look]
        self.tick.change(self.draw, inputs, [self.bot, self.earlier], trigger_mode="always_last", **QUIET)
        self.header.act(self.get_model, None, None, **QUIET)
        self.box.submit(self.send, [self.box, self.look], [self.box], **QUIET)
        self.box.stop(self.stop, inputs, None, **QUIET)
        self.bot.example_select(self.choose_example, inputs, None, **QUIET)
        self.bot.retry(self.retry, inputs, None, **QUIET)
        edit = self.bot.edit(self.edit, inputs, None, **QUIET)
        # Gradio shows the new words at once.
        edit.failure(self.draw, inputs, [self.bot, self.earlier], **QUIET)
        self.bot.option_select(self.choose, inputs, None, **QUIET)
        self.earlier.click(self.show_more, inputs, None, **QUIET)

    async def present(self, look: Look) -> Chat | None:
        """Return the shown chat; None: a new one, or it is gone."""
        if look.chat_id is None:
            return None
        try:
            return await self.chats.chat(look.chat_id)
        except NotFoundError:
            look.chat_id = None
            return None

    async def draw(self, look: Look, request: gr.Request) -> AsyncIterator[tuple[Any, Any]]:
        """Show the chat's messages, and follow the answers that grow in it to their end."""
        news = self.services.news
        while await is_read(request):
            chat = await self.present(look)
            chat_id = look.chat_id
            if chat is None or chat_id is None:
                look.message_ids = []
                yield [], gr.update(visible=False)
                return
            with (
                news.follow(chat_topic(chat_id), look.topic) as changed,
                news.follow(text_topic(chat_id), chat_topic(chat_id), look.topic) as grown,
            ):
                while not changed.is_set() and await is_read(request):
                    grown.clear()
                    messages = list(map(self.chats.answers.present, chat.messages))
                    drawn = rows_of(messages, chat.leaf_id, look.window)
                    look.message_ids = drawn.message_ids
                    yield drawn.rows, gr.update(visible=drawn.num_hidden > 0)
                    if not drawn.is_live:
                        return
                    await asyncio.sleep(FRAME_S)
                    await grown.wait()

    async def send(self, value: dict[str, Any], look: Look) -> Any:
        text, files = value.get("text") or "", value.get("files") or []
        if not text.strip() and not files:
            return gr.skip()
        with telling():
            attached = []
            for path in files:
                content = await asyncio.to_thread(read_upload, path)
                attached.append((await self.chats.attach(Path(path).name, content)).id)
            await self.ask(look, text, attached)
        # Gradio deletes the files a day later: another page may have attached the same one, under this path.
        return {"text": "", "files": []}

    async def ask(self, look: Look, text: str, attachment_ids: list[str]) -> None:
        """Ask after the shown branch's end, in a new chat where there is none."""
        chat = await self.present(look)
        if chat is None:
            chat = await self.chats.create(Settings())
        await self.chats.answers.ask(chat.entry.id, chat.leaf_id, text, attachment_ids)
        self.go(look, chat.entry.id)

    def go(self, look: Look, chat_id: str | None) -> None:
        """Let the page show another chat."""
        if look.chat_id != chat_id:
            look.chat_id, look.window, look.message_ids = chat_id, WINDOW, []
        self.services.news.tell(look.topic)

    async def stop(self, look: Look) -> None:
        chat = await self.present(look)
        if chat is not None and chat.leaf_id is not None:
            with telling():
                await self.chats.answers.stop(chat.leaf_id)

    async def retry(self, look: Look, event: gr.RetryData) -> None:
        with telling():
            message = await self._message(look, event.index)
            if message.role == "user":  # the last one, without an answer after it in the rows
                chat = await self.chats.chat(message.chat_id)
                message = next(one for one in reversed(chat.messages) if one.parent_id == message.id)
            await self.chats.answers.retry(message.id)

    async def edit(self, look: Look, event: gr.EditData) -> None:
        """Ask a question in other words, as a branch beside it."""
        with telling():
            old = await self._message(look, event.index)
            files = [one.id for one in old.attachments]
            await self.chats.answers.ask(old.chat_id, old.parent_id, str(event.value), files)

    async def choose(self, look: Look, event: gr.SelectData) -> None:
        """Allow a call or refuse it, continue an answer, or show another variant."""
        act, _, message_id = str(event.value).partition(" ")
        if look.chat_id is None:
            return
        with telling():
            if act in DECISIONS:
                message_id, _, place = message_id.partition(" ")
                self.chats.answers.calls.decide(act, message_id, place)
            elif act == "continue":
                await self.chats.answers.resume(message_id)
            else:
                await self.chats.change(look.chat_id, leaf_id=message_id)

    async def choose_example(self, look: Look, event: gr.SelectData) -> None:
        with telling():
            await self.ask(look, str(event.value["text"]), [])

    async def get_model(self, event: gr.EventData) -> None:
        """Download and load the model that the first page offers."""
        with telling():
            self.services.shelf.start_pull(event._data["name"], load=True)

    async def show_more(self, look: Look) -> None:
        look.window += 3 * WINDOW
        self.services.news.tell(look.topic)

    async def _message(self, look: Look, row: Any) -> Message:
        index = row[0] if isinstance(row, list | tuple) else row
        chat = await self.present(look)
        ids = look.message_ids
        if chat is None or not 0 <= index < len(ids):
            raise NotFoundError("the chat has changed meanwhile: try again")
        return next(message for message in chat.messages if message.id == ids[index])

    def is_live(self, chat: Chat | None) -> bool:
        """Return whether the shown answer is being written."""
        return chat is not None and any(one.is_live for one in chat.messages if one.id == chat.leaf_id)

    def tick_of(self, look: Look, chat: Chat | None) -> str:
        """Return a text that differs where `draw` has something to do."""
        if chat is None:
            return look.topic
        states = [message.state for message in chat.messages]
        return f"{chat.entry.id} {chat.leaf_id} {len(states)} {states[-3:]} {look.window}"

    def model_line(self, look: Look) -> Markup:
        """Return the header: which model answers, and before the first question the offer of a real one."""
        host, shelf = self.services.host, self.services.shelf
        if host.loading is not None:
            state, text = "loading", f"Loading {host.loading.name} … {host.loading.share:.0%}"
        else:
            try:
                service = host.service
                context = f"{service.max_context_tokens:,} tokens of context"
                state, text = "ready", f"{service.model_name} · {context}"
            except NoModelError:
                state, text = "none", host.error or "No model is loaded: choose one"
        told = [self.services.trouble, self.chats.answers.notice, shelf.pull_error]
        if shelf.pulling is not None:
            told.append(f"Downloading {shelf.pulling.name} … {shelf.pulling.share:.0%}")
        is_offered = shelf.has_offer and shelf.pulling is None and look.chat_id is None
        return tag(
            "div",
            tag("span", class_="dot"),
            tag("a", text, href="models"),
            [tag("p", one, class_="trouble") for one in told if one],
            offer_html() if is_offered else None,
            class_="model-line",
            data_state=state,
            data_address=f"?chat={look.chat_id}" if look.chat_id else "",
        )

    def figures(self, chat: Chat | None) -> Markup:
        """Return the line below the messages: speed of the last answer, and how full the context is."""
        if chat is None:
            return Markup()
        way = branch({message.id: message for message in chat.messages}, chat.leaf_id)
        last = way[-1] if way else None
        parts: list[str] = []
        if last is not None and last.figures is not None and not last.is_live:
            figures = last.figures
            facts = (
                (figures.output_tokens, "{:,} tokens"),
                (figures.tokens_per_s, "{:.1f} tokens/s"),
                (figures.first_token_s, "first token after {:.2f} s"),
            )
            parts = [text.format(value) for value, text in facts if value is not None]
        try:
            most = self.services.host.service.max_context_tokens
        except NoModelError:
            most = 0
        used = used_tokens(way)
        gauge = None
        if most and used:
            label = f"{used:,} of {most:,} tokens of context"
            gauge = tag("meter", label, min=0, max=most, value=used, title=label)
        return tag("div", " · ".join(parts), gauge, class_="figures")
