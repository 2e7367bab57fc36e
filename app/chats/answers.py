"""Answers belong to the server: it writes them without a page, and saves them while they grow.

ask(), retry(), resume() ──→ a task per answer: prompt → engine → GrowingAnswer
                                 │ every half second: one transaction for all that grew ──→ store
                                 │ each token ────────────────────────────────────────────→ news
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from neo_desktop.app.chats.attachments import check_length
from neo_desktop.app.chats.database import FunctionThread, StoreError
from neo_desktop.app.chats.messages import Message, NotFoundError, NotPossibleError, Settings, State, to_send
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.chats.tool_calls import MAX_ROUNDS, ToolCalls
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError, EngineRestartingError, ServiceStoppedError
from neo_desktop.app.generate import outputs
from neo_desktop.app.generate.conversation import Begun, Conversation
from neo_desktop.app.generate.tools import Tool
from neo_desktop.app.mcp.config import McpError
from neo_desktop.app.mcp.servers import McpServers
from neo_desktop.app.news import CHATS, News, chat_topic, text_topic
from neo_desktop.app.shelf.hosting import ModelHost

logger = logging.getLogger(__name__)

MAX_ATTACHMENTS = 20
SAVE_S = 0.5  # less than a second is unsaved, also when saving takes its time

T = TypeVar("T")


class Answers:
    """All answers that are being written here."""

    def __init__(
        self, host: ModelHost, store: ChatStore, worker: FunctionThread, news: News, servers: McpServers
    ) -> None:
        self._host = host
        self.calls = ToolCalls(servers)
        self._store = store
        self._worker = worker
        self._growing: dict[str, GrowingAnswer] = {}  # by message id, until their end is saved
        self._news = news
        self._tasks: dict[str, asyncio.Task[None]] = {}  # message id → its writing
        self.notice = store.notice  # for people: trouble with the file
        self._saving: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    def present(self, message: Message) -> Message:
        """Return a message with the text that is not saved yet."""
        growing = self._growing.get(message.id)
        return message if growing is None else growing.message

    async def ask(
        self, chat_id: str, parent_id: str | None, text: str, attachment_ids: Sequence[str] = ()
    ) -> tuple[Message, Message]:
        """Put a question and begin to answer it, see `ChatStore.ask`. NotPossibleError: its length."""
        if not text.strip() and not attachment_ids:
            raise NotPossibleError("the question is empty")
        check_length(text)
        if len(attachment_ids) > MAX_ATTACHMENTS:
            raise NotPossibleError(f"a question takes at most {MAX_ATTACHMENTS} files")

        async def begin() -> tuple[Message, Message]:
            question, answer = await self._worker(self._store.ask, chat_id, parent_id, text, attachment_ids)
            await self._start(answer)
            return question, answer

        return await asyncio.shield(self._errand(begin()))

    async def retry(self, answer_id: str) -> Message:
        async def begin() -> Message:
            return await self._start(await self._worker(self._store.retry, answer_id))

        return await asyncio.shield(self._errand(begin()))

    async def resume(self, answer_id: str) -> Message:
        async def begin() -> Message:
            await self._save()
            return await self._start(await self._worker(self._store.reopen, answer_id))

        return await asyncio.shield(self._errand(begin()))

    async def stop(self, answer_id: str) -> Message:
        """End an answer at once; an ended one does not change. NotFoundError, NotPossibleError."""
        if answer_id not in self._growing:
            message = await self._worker(self._store.message, answer_id)
            if not message.is_live:
                return message
            if answer_id not in self._growing:
                raise NotPossibleError(
                    "another neo-desktop on this computer writes this answer: stop it there"
                )
        growing = self._growing[answer_id]
        self._end(growing, "stopped")
        return growing.message

    def stop_chat(self, chat_id: str) -> None:
        for growing in list(self._growing.values()):
            if growing.message.chat_id == chat_id:
                self._end(growing, "stopped")

    async def close(self) -> None:
        """End all answers as cut, and save them."""
        self._is_closed = True
        for growing in list(self._growing.values()):
            self._end(growing, "cut")
        if self._saving is not None:
            self._saving.cancel()
        if self._errands:
            await asyncio.wait(self._errands)
        await self._save()

    def _errand(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin what is finished even when its client leaves."""
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def _start(self, answer: Message) -> Message:
        growing = self._growing[answer.id] = GrowingAnswer(answer)
        if self._is_closed:
            self._end(growing, "cut")
            return growing.message
        self._tasks[answer.id] = asyncio.create_task(self._write(growing))
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._keep_saving())
        self._changed(answer.chat_id)
        return answer

    def _end(self, growing: GrowingAnswer, state: State, error: str | None = None) -> None:
        """Stop writing an answer and abort its request; an ended one does not change."""
        if not growing.message.is_live:
            return
        growing.end(state, error)
        task = self._tasks.pop(growing.message.id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

        async def save() -> None:
            await self._save()
            self._changed(growing.message.chat_id)

        self._changed(growing.message.chat_id)
        self._errand(save())

    async def _write(self, growing: GrowingAnswer) -> None:
        try:
            question_id = growing.message.parent_id
            assert question_id is not None
            settings, way = await self._worker(self._store.way_to, question_id)
            for _ in range(MAX_ROUNDS):
                if not await self._write_round(growing, settings, way):
                    self._end(growing, "done")
                    return
            reason = f"The model called tools {MAX_ROUNDS} times in a row. Continue lets it go on."
            self._end(growing, "stopped", reason)
        except (ServiceStoppedError, EngineRestartingError) as error:
            self._end(growing, "cut", str(error))
        except ApiError as error:
            advice = ". Or start a new chat" if error.code == "context_length_exceeded" else ""
            self._end(growing, "failed", f"{error}{advice}")
        except (McpError, NotFoundError, StoreError, ValueError) as error:
            self._end(growing, "failed", str(error))
        except Exception:
            logger.exception("an answer failed")
            self._end(growing, "failed", "the server failed to answer; its log says why")

    async def _write_round(self, growing: GrowingAnswer, settings: Settings, way: list[Message]) -> bool:
        """Write until the answer ends, or until the model calls tools: then True."""
        service = await self._service()
        message = growing.message
        told = partial(self._news.tell, text_topic(message.chat_id))
        tools = await self.calls.tools(settings.servers)
        await self.calls.settle(growing, tools, service.max_context_tokens, told)
        service = await self._service()  # meanwhile the model may have been unloaded, or another one loaded
        earlier = [one for round_ in growing.message.rounds for one in round_.messages()]
        conversation = Conversation(
            [*to_send(way, settings), *earlier],
            tools=[Tool(name, tool.description, tool.parameters) for name, tool in tools.items()],
            begun=Begun(message.thought, message.text),
        )
        # What the chat does not set is the model's own.
        params = outputs.sampling_params(service.sampling_defaults, **settings.sampling())
        async with await outputs.begin(service, conversation, params, cuts_max_tokens=True) as answer:
            growing.begin(answer, service.model_name)
            async for step in answer:
                growing.add(step)
                told()
        return growing.end_round()

    async def _service(self) -> EngineService:
        """The loaded model's, or that of the model which is being loaded: answers wait for it."""
        while self._host.loading is not None:
            has_changed = asyncio.Event()
            self._host.listeners.append(has_changed.set)
            try:
                await has_changed.wait()
            finally:
                self._host.listeners.remove(has_changed.set)
        return await self._host.ready()

    async def _keep_saving(self) -> None:
        while self._growing:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> None:
        """Save what has grown; what cannot be saved is kept, and tried again."""
        unsaved = [one for one in self._growing.values() if one.message is not one.saved]
        messages = [one.message for one in unsaved]
        if not unsaved:
            return
        try:
            await self._worker(self._store.save, messages)
        except StoreError as error:
            self._notice(f"Answers cannot be saved at present: {error}.")
            return
        self._notice(self._store.notice)
        for growing, message in zip(unsaved, messages, strict=True):
            growing.saved = message
            if (
                growing.message is message
                and not message.is_live
                and self._growing.get(message.id) is growing
            ):
                del self._growing[message.id]

    def _notice(self, notice: str | None) -> None:
        if notice != self.notice:
            self.notice = notice
            if notice is not None:
                logger.warning(notice)
            self._news.tell(CHATS)

    def _changed(self, chat_id: str) -> None:
        self._news.tell(chat_topic(chat_id))
        self._news.tell(text_topic(chat_id))
        self._news.tell(CHATS)
