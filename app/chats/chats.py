"""All that belongs to the chats of one server, put together: what the page reads and does."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from neo_desktop.app.chats import transfer
from neo_desktop.app.chats.answers import Answers
from neo_desktop.app.chats.attachments import MAX_PDF_READERS, check_length, read_file
from neo_desktop.app.chats.database import FunctionThread
from neo_desktop.app.chats.messages import Attachment, Chat, ChatEntry, Settings
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.errors import NoModelError
from neo_desktop.app.mcp.servers import McpServers
from neo_desktop.app.news import CHATS, News, chat_topic
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.sampling_params import SamplingParams

P = ParamSpec("P")
T = TypeVar("T")


class Chats:
    """The store, the thread that it lives in, and the answers under way.

    StoreError: in all methods, when the chats cannot be kept in the folder. NotFoundError: in all
    methods that take an id.
    """

    def __init__(self, host: ModelHost, news: News, folder: Path) -> None:
        self._host = host
        self._store = ChatStore(folder)
        self._worker = FunctionThread("chats")
        self._news = news
        self._readers = asyncio.Semaphore(MAX_PDF_READERS)
        self.servers = McpServers(folder, news)
        self.answers = Answers(host, self._store, self._worker, news, self.servers)

    async def close(self) -> None:
        await self.answers.close()
        await self.servers.close()
        await self._worker(self._store.close)
        self._worker.close()

    async def entries(self, query: str = "") -> list[ChatEntry]:
        return await self._worker(self._store.entries, query)

    async def chat(self, chat_id: str) -> Chat:
        chat = await self._worker(self._store.chat, chat_id)
        return replace(chat, messages=tuple(map(self.answers.present, chat.messages)))

    async def version(self) -> int:
        return await self._worker(self._store.version)

    async def create(self, settings: Settings) -> Chat:
        """Return a new chat without messages; SettingError, NotPossibleError: a value is out of range."""
        check_settings(settings)
        return await self._change(self._store.create, settings)

    async def change(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        settings: Settings | None = None,
        leaf_id: str | None = None,
    ) -> None:
        """Change what is given, see `ChatStore.change`; errors as of `create`."""
        check_settings(settings or Settings())
        await self._change(self._store.change, chat_id, title=title, settings=settings, leaf_id=leaf_id)

    async def delete(self, chat_id: str) -> None:
        """End a chat's answers and take it off the list; `restore` brings it back."""
        self.answers.stop_chat(chat_id)
        await self._worker(self._store.delete, chat_id)
        self._told(chat_id)

    async def restore(self, chat_id: str) -> None:
        await self._change(self._store.restore, chat_id)

    async def attach(self, name: str, content: bytes) -> Attachment:
        """Keep a file's text or image for a question; ApiError says why a file cannot be read."""
        try:
            blindness = self._host.service.blindness
        except NoModelError:
            blindness = ""  # the next model may read images
        name, kind, text = await read_file(name, content, self._readers, blindness)
        return await self._worker(self._store.attach, name, kind, text)

    async def export(self, chat_id: str | None, *, as_markdown: bool = False) -> str:
        """Return one chat, or all chats, as text for a file."""
        ids = [entry.id for entry in await self.entries()] if chat_id is None else [chat_id]
        chats = [await self._worker(self._store.chat, one) for one in ids]
        if as_markdown:
            return "\n\n".join([await asyncio.to_thread(transfer.to_markdown, chat) for chat in chats])
        return await asyncio.to_thread(transfer.to_json, chats)

    async def add(self, content: bytes) -> list[str]:
        """Take in chats from a file that `export` wrote; ValidationError: the file is another one."""
        chats = await asyncio.to_thread(transfer.from_json, content)
        ids = await self._worker(self._store.add_chats, chats)
        self._news.tell(CHATS)
        return ids

    async def _change(self, change: Callable[P, Chat], *args: P.args, **kwargs: P.kwargs) -> Chat:
        chat = await self._worker(change, *args, **kwargs)
        self._told(chat.entry.id)
        return chat

    def _told(self, chat_id: str) -> None:
        self._news.tell(chat_topic(chat_id))
        self._news.tell(CHATS)


def check_settings(settings: Settings) -> None:
    """Raise SettingError or NotPossibleError if a value is out of range."""
    check_length(settings.system_prompt or "")
    SamplingParams(**settings.sampling())
