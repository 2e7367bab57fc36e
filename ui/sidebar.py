"""The list of chats: open, search, delete with undo, export and import."""

import asyncio
import os
import time
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.chats.messages import ChatEntry, NotFoundError
from neo_desktop.ui.chat import ChatView, Look, read_upload
from neo_desktop.ui.following import QUIET
from neo_desktop.ui.html import button, panel, tag
from neo_desktop.ui.refusals import telling

# A click on Gradio's own button saves what an earlier click has exported.
DOWNLOAD = """(file) => {
    const link = document.createElement("a");
    link.href = file.url;
    link.download = file.orig_name;
    link.click();
}"""


class Sidebar:
    """The components of the list, and what their events do."""

    def __init__(self, chat: ChatView) -> None:
        self._chat = chat
        self._chats = chat.chats
        self.new = gr.Button("New chat", variant="primary", elem_id="new-chat")
        self.search = gr.Textbox(
            show_label=False, container=False, placeholder="Search", elem_id="search", max_lines=1
        )
        self.list = panel(elem_id="chats")
        with gr.Accordion("This chat", open=False):
            self.title = gr.Textbox(label="Title", max_lines=1, max_length=200, elem_id="title")
            with gr.Row():
                self.markdown = gr.Button("Markdown", size="sm")
                self.json = gr.Button("JSON", size="sm")
        with gr.Accordion("All chats", open=False), gr.Row():
            self.everything = gr.Button("Export", size="sm")
            self.upload = gr.UploadButton("Import", size="sm", file_types=[".json"])
        self.file = gr.DownloadButton(visible=False)  # holds what was exported

    def connect(self) -> None:
        look = self._chat.look
        self.new.click(self.start_chat, [look], None, **QUIET)
        self.list.act(self.act, [look], None, **QUIET)
        self.search.change(self.find, [self.search, look], None, trigger_mode="always_last", **QUIET)
        self.title.submit(self.rename, [self.title, look], None, **QUIET)
        self.title.blur(self.rename, [self.title, look], None, trigger_mode="always_last", **QUIET)
        files = ((self.markdown, "chat.md"), (self.json, "chat.json"), (self.everything, "chats.json"))
        for component, name in files:
            export = component.click(self._exporter(name), [look], [self.file], **QUIET)
            export.success(None, [self.file], None, js=DOWNLOAD, api_visibility="private")
        self.upload.upload(self.take_in, [self.upload, look], None, **QUIET)

    async def entries(self, look: Look) -> Markup:
        entries = await self._chats.entries(look.query)
        parts: list[Markup] = []
        if look.deleted is not None:
            undo = button("Undo", "restore", kind="link")
            parts.append(tag("p", f"Deleted “{look.deleted[1]}”. ", undo, class_="note", role="status"))
        for day, of_day in by_day(entries, time.time()):
            rows = [self._entry(entry, look) for entry in of_day]
            parts += [tag("h3", day), tag("ul", rows)]
        if not entries:
            parts.append(tag("p", "Nothing found" if look.query.strip() else "No chats yet", class_="muted"))
        return tag("nav", parts, aria_label="Chats")

    def _entry(self, entry: ChatEntry, look: Look) -> Markup:
        title = entry.title or "New chat"
        is_shown = entry.id == look.chat_id
        link = tag(
            "a",
            tag("span", title, class_="title"),
            tag("span", entry.snippet, class_="muted") if entry.snippet else None,
            href=f"?chat={entry.id}",
            data_act="open",
            data_id=entry.id,
            aria_current="page" if is_shown else None,
        )
        mark = tag("span", "●", class_="streaming", title="An answer is being written")
        remove = button("✕", "delete", kind="quiet", title=f"Delete “{title}”", id=entry.id)
        return tag("li", link, mark if entry.is_streaming else None, remove)

    async def act(self, look: Look, event: gr.EventData) -> None:
        """Open, delete or restore a chat."""
        asked: dict[str, str] = event._data
        with telling():
            match asked["act"]:
                case "open":
                    look.deleted = None
                    self._chat.go(look, asked["id"])
                case "delete":
                    chat = await self._chats.chat(asked["id"])
                    look.deleted = chat.entry.id, chat.entry.title
                    await self._chats.delete(chat.entry.id)
                    self._chat.go(look, None if look.chat_id == chat.entry.id else look.chat_id)
                case "restore" if look.deleted is not None:
                    chat_id, look.deleted = look.deleted[0], None
                    await self._chats.restore(chat_id)
                    self._chat.go(look, chat_id)

    async def start_chat(self, look: Look) -> None:
        look.deleted = None
        self._chat.go(look, None)

    async def find(self, query: str, look: Look) -> None:
        """List the chats that hold all words."""
        look.query = query[:1000]
        self._chat.services.news.tell(look.topic)

    async def rename(self, title: str, look: Look) -> None:
        chat = await self._chat.present(look)
        if chat is not None and title.strip() and title.strip() != chat.entry.title:
            with telling():
                await self._chats.change(chat.entry.id, title=title.strip()[:200])

    def _exporter(self, name: str) -> Any:
        async def export(look: Look) -> str:
            is_one, as_markdown = name.startswith("chat."), name.endswith(".md")
            with telling():
                if is_one and look.chat_id is None:
                    raise NotFoundError("there is no chat to export yet")
                text = await self._chats.export(look.chat_id if is_one else None, as_markdown=as_markdown)
            file = Path(mkdtemp(dir=os.environ["GRADIO_TEMP_DIR"])) / f"neo-desktop {name}"
            file.write_text(text, encoding="utf-8")
            return str(file)

        return export

    async def take_in(self, path: str, look: Look) -> None:
        """Import chats."""
        with telling():
            ids = await self._chats.add(await asyncio.to_thread(read_upload, path))
        gr.Info(f"Imported {len(ids)} chat{'' if len(ids) == 1 else 's'}.")
        if ids:
            self._chat.go(look, ids[0])


def by_day(entries: Iterable[ChatEntry], now_s: float) -> list[tuple[str, list[ChatEntry]]]:
    """Return entries, the newest first, under "Today", "Yesterday", "This week", then months."""
    today = datetime.fromtimestamp(now_s).date()

    def day(entry: ChatEntry) -> str:
        date = datetime.fromtimestamp(entry.updated_s).date()
        age = (today - date).days
        if age < 7:
            return "Today" if age <= 0 else "Yesterday" if age == 1 else "This week"
        return f"{date:%B %Y}"

    return [(name, list(group)) for name, group in groupby(entries, day)]
