"""What pages are told of chats. Nothing is read or rendered when nobody looks."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Any

from neo_desktop.app.chats.blocks import GrowingBlocks
from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.errors import NotFoundError
from neo_desktop.app.chats.messages import Chat, Message
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.chats.views import Json, chat_view, list_view, node_view, whole_view
from neo_desktop.app.chats.worker import FunctionThread
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.app.shelf.hosting import ModelHost, NoModelError
from neo_desktop.app.web.events import Hub

OTHERS_S = 1.0  # how often to look for what other processes have changed, while somebody looks here
FRAME_S = 1 / 15  # an answer is drawn at most this often,
FRAME_SHARE = 4  # and drawing takes a fourth of the time at most


class News:
    """Reads chats as they are now, and tells those who look at them.

    Args:
        host: knows how much context there is.
        store: where chats are kept.
        worker: the store's thread.
        growing: answers that are being written, or not saved yet, by id.
        hub: passes the news on.
    """

    def __init__(
        self,
        host: ModelHost,
        store: ChatStore,
        worker: FunctionThread,
        growing: dict[str, GrowingAnswer],
        hub: Hub,
    ) -> None:
        self.notice = store.notice  # for people: trouble with the file
        self._host = host
        self._store = store
        self._worker = worker
        self._growing = growing
        self._hub = hub
        self._rendering = FunctionThread("render")
        self._tasks: set[asyncio.Task[None]] = set()
        self._list_is_old = False
        self._list_is_made = False
        self._told_max_tokens = self._max_tokens
        self._watching: asyncio.Task[None] | None = None
        hub.greet("chats", self._greeting)
        host.listeners.append(self._model_changed)

    def close(self) -> None:
        """Tell nothing more, and end the thread."""
        for task in self._tasks:
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self._rendering.close()

    # Views of what is.

    async def list_view(self, query: str = "") -> Json:
        """The list of chats."""
        try:
            return list_view(await self._worker(self._store.entries, query), self.notice)
        except StoreError as error:
            return {"chats": [], "notice": str(error)}

    def chat_view(self, chat: Chat) -> Json:
        """A chat without its messages."""
        return chat_view(self._as_it_is(chat), self._max_tokens)

    async def whole_view(self, chat: Chat) -> Json:
        """A chat with its messages."""
        return await self._rendering(whole_view, self._as_it_is(chat), self._max_tokens)

    async def node_view(self, message: Message) -> Json:
        """A message."""
        return await self._rendering(node_view, message)

    async def whole_chat(self, chat_id: str) -> Json | None:
        """A chat with its messages; None if there is none."""
        try:
            return await self.whole_view(await self._worker(self._store.chat, chat_id))
        except (NotFoundError, StoreError):
            return None

    # News. They return at once; what is told follows.

    def list_changed(self) -> None:
        """The list of chats is another one."""
        self._list_is_old = True
        if not self._list_is_made:
            self._list_is_made = True
            self._run(self._tell_list())

    def chat_changed(self, chat: Chat) -> None:
        """Title, settings or what is shown of a chat is another one."""
        if self._hub.has_listeners("chat", chat.entry.id):
            view = chat_view(self._as_it_is(chat), self._max_tokens)
            self._hub.publish("chat", view, chat.entry.id, merge=_joined)

    def messages_changed(self, *messages: Message) -> None:
        """Messages are new, or an answer has ended."""
        for message in messages:
            if self._hub.has_listeners("node", message.chat_id):
                self._run(self._tell_node(message))

    def context_changed(self, chat_id: str) -> None:
        """More of the context is used."""
        if self._hub.has_listeners("context", chat_id):
            self._run(self._tell_context(chat_id))

    async def draw(self, growing: GrowingAnswer) -> None:
        """Tell how an answer grows, until cancelled."""
        chat_id, text, thought = growing.message.chat_id, GrowingBlocks(), GrowingBlocks()
        clock = asyncio.get_running_loop().time
        while True:
            await growing.has_grown.wait()
            growing.has_grown.clear()
            if not self._hub.has_listeners("delta", chat_id):
                continue
            start_s, message = clock(), growing.message
            delta = await self._rendering(_delta, message, text, thought)
            self._hub.publish("delta", delta, chat_id, key=_delta_key(message), merge=_merged_deltas)
            await asyncio.sleep(max(FRAME_S, FRAME_SHARE * (clock() - start_s)))

    async def _greeting(self) -> Json:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_others())
        return await self.list_view()

    async def _watch_others(self) -> None:
        """Tell what another server on the same file has done, until nobody looks."""
        seen = None
        while self._hub.has_listeners():
            with contextlib.suppress(StoreError):
                version = await self._worker(self._store.version)
                if seen is not None and version != seen:
                    self.list_changed()
                    for chat_id in self._hub.chats_looked_at():
                        whole = await self.whole_chat(chat_id)
                        if whole is not None:
                            self._hub.publish("chat", whole, chat_id, merge=_joined)
                seen = version
            await asyncio.sleep(OTHERS_S)

    async def _tell_list(self) -> None:
        try:
            while self._list_is_old and self._hub.has_listeners("chats"):
                self._list_is_old = False
                self._hub.publish("chats", await self.list_view())
        finally:
            self._list_is_made = False

    async def _tell_node(self, message: Message) -> None:
        # The thread works in order: what was drawn of this answer before comes before.
        view = await self.node_view(message)
        self._hub.publish(
            "node", view, message.chat_id, key=f"node {message.id}", replaces=_delta_key(message)
        )

    async def _tell_context(self, chat_id: str) -> None:
        chat = await self._worker(self._store.chat, chat_id)
        context = chat_view(self._as_it_is(chat), self._max_tokens)["context"]
        self._hub.publish("context", context, chat_id)

    def _model_changed(self) -> None:
        """Another model has another context."""
        if self._max_tokens != self._told_max_tokens:
            self._told_max_tokens = self._max_tokens
            for chat_id in self._hub.chats_looked_at():
                self.context_changed(chat_id)

    def _run(self, telling: Coroutine[Any, Any, None]) -> None:
        async def tell() -> None:
            # Gone meanwhile, or trouble that the notice tells of.
            with contextlib.suppress(NotFoundError, StoreError):
                await telling

        task = asyncio.create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _as_it_is(self, chat: Chat) -> Chat:
        """With what has not been saved yet."""
        growing = self._growing
        messages = [growing[one.id].message if one.id in growing else one for one in chat.messages]
        return replace(chat, messages=tuple(messages))

    @property
    def _max_tokens(self) -> int | None:
        try:
            return self._host.service.max_context_tokens
        except NoModelError:
            return None


def _delta_key(message: Message) -> str:
    return f"delta {message.id}"


def _delta(message: Message, text: GrowingBlocks, thought: GrowingBlocks) -> Json:
    blocks_from, blocks = text.update(message.text)
    thought_blocks_from, thought_blocks = thought.update(message.thought)
    return {
        "id": message.id,
        "state": message.state,
        "thought_s": message.thought_s,
        "figures": None if message.figures is None else asdict(message.figures),
        "blocks_from": blocks_from,
        "blocks": blocks,
        "thought_blocks_from": thought_blocks_from,
        "thought_blocks": thought_blocks,
    }


def _joined(older: Json, newer: Json) -> Json:
    return older | newer


def _merged_deltas(older: Json, newer: Json) -> Json:
    merged = dict(newer)
    for blocks in ("blocks", "thought_blocks"):
        start = older[f"{blocks}_from"]
        merged[f"{blocks}_from"] = start
        merged[blocks] = older[blocks][: newer[f"{blocks}_from"] - start] + newer[blocks]
    return merged
