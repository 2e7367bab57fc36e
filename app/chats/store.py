"""All chats in one SQLite file. Every method is one short transaction, not for the event loop's thread."""

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from neo_desktop.app.chats.database import open_database, transaction
from neo_desktop.app.chats.messages import (
    Attachment,
    Chat,
    ChatEntry,
    Figures,
    Kind,
    Message,
    NotFoundError,
    NotPossibleError,
    Round,
    Settings,
    branch,
    make_title,
    newest_leaf,
)

BEING_WRITTEN = "the answer is still being written: wait for its end, or stop it"
DELETED_FOR_S = 24 * 3600  # a deleted chat can be restored for at least this long
SNIPPET_CHARS = 80
CLOCK_TOLERANCE_S = 5.0  # processes report slightly different start times
# Columns that hold JSON.
_SETTINGS = TypeAdapter(Settings)
_FIGURES = TypeAdapter(Figures | None)
_ROUNDS = TypeAdapter(tuple[Round, ...])

_ENTRY = """SELECT id, title, created_s, updated_s, EXISTS (SELECT 1 FROM messages WHERE chat_id = chats.id
    AND state IN ('waiting', 'streaming')) FROM chats WHERE deleted_s IS NULL"""
_COLUMNS = (
    *("id", "chat_id", "parent_id", "role", "created_s"),
    *("text", "thought", "thought_s", "state", "error", "rounds", "figures"),
)
_GROWING = ("text", "thought", "thought_s", "state", "error", "rounds", "figures", "server")
_BRANCH = """id IN (WITH RECURSIVE way(id) AS (VALUES (?) UNION ALL
    SELECT parent_id FROM messages JOIN way USING (id) WHERE parent_id IS NOT NULL) SELECT id FROM way)"""


def this_process() -> str:
    """Return a unique name of this process: its number and start time."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def is_alive(owner: str) -> bool:
    """Return True if the process with that name still runs."""
    pid, _, start_s = owner.partition("@")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(start_s)) < CLOCK_TOLERANCE_S
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True  # the process exists, and its start time is unknown


class ChatStore:
    """The chats of a user. One thread at a time may use it; several processes may use one file.

    All methods raise StoreError when the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._connection, self.notice = open_database(folder)
        self._sql = self._connection.execute
        self._owner = this_process()
        self._purge()

    def close(self) -> None:
        self._connection.close()

    # Chats.

    def entries(self, query: str = "") -> list[ChatEntry]:
        """List all chats, the newest first; with a query, those with all its words in title or texts."""
        with transaction(self._connection):
            self._mark_cut()
            rows = self._sql(f"{_ENTRY} ORDER BY updated_s DESC, rowid DESC").fetchall()
            entries = [_entry(row) for row in rows]
            if not query.strip():
                return entries
            snippets = self._snippets(query)
        return [replace(one, snippet=snippets[one.id]) for one in entries if one.id in snippets]

    def _snippets(self, query: str) -> dict[str, str]:
        """Return chat_id -> the text around a hit, for chats with all the words in title or texts.

        The longest word decides what is shown. Case does not matter, nor do parts of words.
        """
        found: dict[str, str] = {}
        words = sorted({word.casefold() for word in query.split()}, key=len, reverse=True)
        for place, word in enumerate(words):
            hits = self._sql(
                """SELECT id, title FROM chats WHERE holds(title, ?1)
                UNION ALL SELECT chat_id, text FROM messages WHERE holds(text, ?1)""",
                (word,),
            )
            around = {chat_id: _around(text, word) for chat_id, text in hits}
            found = {chat_id: found[chat_id] for chat_id in found if chat_id in around} if place else around
        return found

    def chat(self, chat_id: str) -> Chat:
        with transaction(self._connection):
            self._mark_cut()
            entry = self._entry(chat_id)
            return Chat(entry, *self._settings(chat_id), tuple(self._messages("chat_id = ?", chat_id)))

    def create(self, settings: Settings) -> Chat:
        now_s = time.time()
        chat = Chat(ChatEntry(new_id(), "", now_s, now_s, False), settings, None, ())
        self.add_chats([chat])
        return chat

    def change(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        settings: Settings | None = None,
        leaf_id: str | None = None,
    ) -> Chat:
        """Change what is given; a leaf may be any message: its newest descendant is shown. NotFoundError."""
        with transaction(self._connection):
            chat = self.chat(chat_id)
            if title is not None:
                self._set("chats", chat_id, title=title)
            if settings is not None:
                self._set("chats", chat_id, settings=_SETTINGS.dump_json(settings).decode())
            if leaf_id is not None:
                messages = {message.id: message for message in chat.messages}
                if leaf_id not in messages:
                    raise NotFoundError(f"the chat has no message {leaf_id!r}")
                self._set("chats", chat_id, leaf_id=newest_leaf(messages, leaf_id))
            return self.chat(chat_id)

    def delete(self, chat_id: str) -> None:
        """Take a chat off the list; it can be restored for a day at least. NotFoundError."""
        with transaction(self._connection):
            self._entry(chat_id)
            self._set("chats", chat_id, deleted_s=time.time())

    def restore(self, chat_id: str) -> Chat:
        with transaction(self._connection):
            self._set("chats", chat_id, deleted_s=None)
            return self.chat(chat_id)

    def add_chats(self, chats: Iterable[Chat]) -> list[str]:
        """Add chats with all their messages, whose ids must be new; return their ids."""
        with transaction(self._connection):
            return [self._add_chat(chat) for chat in chats]

    # Messages.

    def version(self) -> int:
        """Return a number that changes when another process changes the file."""
        with transaction(self._connection):
            return int(self._sql("PRAGMA data_version").fetchone()[0])

    def message(self, message_id: str) -> Message:
        """Read a message of a chat that is not deleted; NotFoundError."""
        with transaction(self._connection):
            found = self._messages(
                "id = ? AND chat_id IN (SELECT id FROM chats WHERE deleted_s IS NULL)", message_id
            )
        if not found:
            raise NotFoundError(f"there is no message {message_id!r}")
        return found[0]

    def way_to(self, message_id: str) -> tuple[Settings, list[Message]]:
        """Read the chat's settings, and the branch that ends with this message; NotFoundError."""
        with transaction(self._connection):
            settings, _ = self._settings(self.message(message_id).chat_id)
            messages = self._messages(_BRANCH, message_id)
            return settings, branch({message.id: message for message in messages}, message_id)

    def ask(
        self, chat_id: str, parent_id: str | None, text: str, attachment_ids: Sequence[str] = ()
    ) -> tuple[Message, Message]:
        """Add a question after an answer (None: a first one) and its empty answer; both are shown.

        Raises NotFoundError: chat, parent or attachment; NotPossibleError: the parent is no complete answer.
        """
        with transaction(self._connection):
            entry = self._entry(chat_id)
            if parent_id is not None:
                parent = self.message(parent_id)
                if parent.chat_id != chat_id:
                    raise NotFoundError(f"the chat has no message {parent_id!r}")
                if parent.role != "assistant":
                    raise NotPossibleError("parent_id must be an answer's: a question follows an answer")
                if parent.is_live:
                    raise NotPossibleError(BEING_WRITTEN)
            files = tuple(self._attachment(one) for one in attachment_ids)
            question = Message(new_id(), chat_id, parent_id, "user", time.time(), text, attachments=files)
            self._insert(question)
            if not entry.title:
                self._set("chats", chat_id, title=make_title(text or files[0].name))
            return question, self._new_answer(question)

    def retry(self, answer_id: str) -> Message:
        """Add another answer to the question of this one, and show it; NotFoundError, NotPossibleError."""
        with transaction(self._connection):
            answer = self._answer(answer_id)
            assert answer.parent_id is not None
            return self._new_answer(self.message(answer.parent_id))

    def reopen(self, answer_id: str) -> Message:
        """Make an answer that ended live, to be continued; NotFoundError, NotPossibleError."""
        with transaction(self._connection):
            answer = self._answer(answer_id)
            if answer.is_live:
                raise NotPossibleError(BEING_WRITTEN)
            answer = replace(answer, state="waiting", error=None)
            self._update(answer)
            return answer

    def save(self, messages: Iterable[Message]) -> None:
        """Save the progress of answers; removed answers stay removed."""
        with transaction(self._connection):
            for message in messages:
                self._update(message)

    # Attachments.

    def attach(self, name: str, kind: Kind, text: str) -> Attachment:
        """Keep a file's text or image for a later question."""
        file = Attachment(new_id(), name, kind, text)
        with transaction(self._connection):
            self._put("attachments", **asdict(file), created_s=time.time())
        return file

    # Parts of transactions.

    def _put(self, table: str, **fields: object) -> None:
        marks = ", ".join("?" * len(fields))
        self._sql(f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks})", tuple(fields.values()))

    def _set(self, table: str, row_id: str, **fields: object) -> None:
        names = ", ".join(f"{name} = ?" for name in fields)
        self._sql(f"UPDATE {table} SET {names} WHERE id = ?", (*fields.values(), row_id))

    def _entry(self, chat_id: str) -> ChatEntry:
        row = self._sql(f"{_ENTRY} AND id = ?", (chat_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"there is no chat {chat_id!r}: it may have been deleted")
        return _entry(row)

    def _settings(self, chat_id: str) -> tuple[Settings, str | None]:
        settings, leaf_id = self._sql(
            "SELECT settings, leaf_id FROM chats WHERE id = ?", (chat_id,)
        ).fetchone()
        return _SETTINGS.validate_json(settings), leaf_id

    def _messages(self, condition: str, value: str) -> list[Message]:
        chosen = f"FROM messages WHERE {condition}"
        rows = self._sql(f"SELECT {', '.join(_COLUMNS)} {chosen} ORDER BY seq", (value,))
        files: dict[str, list[Attachment]] = {}
        for message_id, *fields in self._sql(
            f"""SELECT message_id, id, name, kind, text FROM attachments JOIN message_attachments
            ON id = attachment_id WHERE message_id IN (SELECT id {chosen}) ORDER BY position""",
            (value,),
        ):
            files.setdefault(message_id, []).append(Attachment(*fields))
        return [_message(row, files.get(row[0], ())) for row in rows]

    def _answer(self, message_id: str) -> Message:
        message = self.message(message_id)
        if message.role != "assistant":
            raise NotPossibleError(
                "this is a question: it can be asked again in other words, but not answered on"
            )
        return message

    def _new_answer(self, question: Message) -> Message:
        answer = Message(
            new_id(), question.chat_id, question.id, "assistant", time.time(), "", state="waiting"
        )
        self._insert(answer)
        self._set("chats", answer.chat_id, leaf_id=answer.id, updated_s=answer.created_s)
        return answer

    def _add_chat(self, chat: Chat) -> str:
        entry = chat.entry
        self._put(
            "chats",
            id=entry.id,
            title=entry.title,
            settings=_SETTINGS.dump_json(chat.settings).decode(),
            leaf_id=chat.leaf_id,
            created_s=entry.created_s,
            updated_s=entry.updated_s,
        )
        for message in chat.messages:
            for file in message.attachments:
                self._put("attachments", **asdict(file), created_s=message.created_s)
            self._insert(message)
        return entry.id

    def _insert(self, message: Message) -> None:
        self._put("messages", **self._record(message))
        for position, file in enumerate(message.attachments):
            self._put("message_attachments", message_id=message.id, position=position, attachment_id=file.id)

    def _update(self, message: Message) -> None:
        record = self._record(message)
        self._set("messages", message.id, **{name: record[name] for name in _GROWING})

    def _record(self, message: Message) -> dict[str, object]:
        record: dict[str, object] = {name: getattr(message, name) for name in _COLUMNS}
        return record | {
            "figures": _FIGURES.dump_json(message.figures).decode(),
            "rounds": _ROUNDS.dump_json(message.rounds).decode(),
            "server": self._owner if message.is_live else None,
        }

    def _attachment(self, attachment_id: str) -> Attachment:
        row = self._sql(
            "SELECT id, name, kind, text FROM attachments WHERE id = ?", (attachment_id,)
        ).fetchone()
        if row is None:
            raise NotFoundError(f"there is no attachment {attachment_id!r}: attach the file again")
        return Attachment(*row)

    def _mark_cut(self) -> None:
        """Mark the live answers of dead processes as cut."""
        owners = self._sql(
            "SELECT DISTINCT server FROM messages WHERE state IN ('waiting', 'streaming')"
        ).fetchall()
        for (owner,) in owners:
            if owner != self._owner and not is_alive(owner):
                self._sql(
                    """UPDATE messages SET state = 'cut', server = NULL
                    WHERE state IN ('waiting', 'streaming') AND server IS ?""",
                    (owner,),
                )

    def _purge(self) -> None:
        """Remove chats that were deleted long ago, and files that no question needs."""
        before_s = time.time() - DELETED_FOR_S
        with transaction(self._connection):
            self._mark_cut()
            self._sql("DELETE FROM chats WHERE deleted_s < ?", (before_s,))
            self._sql(
                """DELETE FROM attachments WHERE created_s < ?
                AND id NOT IN (SELECT attachment_id FROM message_attachments)""",
                (before_s,),
            )


def _around(text: str, word: str) -> str:
    at = max(text.casefold().find(word), 0)
    start = max(at - SNIPPET_CHARS // 2, 0)
    end = start + SNIPPET_CHARS
    piece = " ".join(text[start:end].split())
    return ("…" if start else "") + piece + ("…" if end < len(text) else "")


def new_id() -> str:
    return secrets.token_hex(8)


def _message(row: Sequence[Any], files: Iterable[Attachment]) -> Message:
    *fields, rounds, figures = row
    named: dict[str, Any] = dict(zip(_COLUMNS, fields, strict=False))
    named["rounds"] = _ROUNDS.validate_json(rounds or "[]")
    named["figures"] = _FIGURES.validate_json(figures or "null")
    return Message(**named, attachments=tuple(files))


def _entry(row: Sequence[Any]) -> ChatEntry:
    chat_id, title, created_s, updated_s, is_streaming = row
    return ChatEntry(chat_id, title, created_s, updated_s, bool(is_streaming))
