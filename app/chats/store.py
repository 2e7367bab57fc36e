"""All chats, in one SQLite file. Every method is one short transaction, not for the event loop's thread."""

import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neo_desktop.app.chats.database import open_database, transaction
from neo_desktop.app.chats.errors import BeingAnsweredError, NotFoundError, NotPossibleError
from neo_desktop.app.chats.messages import (
    Attachment,
    Chat,
    ChatEntry,
    Figures,
    Message,
    Settings,
    branch,
    make_title,
    newest_leaf,
)
from neo_desktop.app.chats.search import Search
from neo_desktop.engine.processes import is_alive, this_process

DELETED_FOR_S = 24 * 3600  # how long a deleted chat can be restored at least

_ENTRY = """SELECT id, title, created_s, updated_s, EXISTS (SELECT 1 FROM messages WHERE chat_id = chats.id
    AND state IN ('waiting', 'streaming')) FROM chats WHERE deleted_s IS NULL"""
_COLUMNS = (
    *("id", "chat_id", "parent_id", "role", "created_s"),
    *("text", "thought", "thought_s", "state", "error", "figures"),
)
_MESSAGE = f"SELECT {', '.join(_COLUMNS)} FROM messages"


class ChatStore:
    """The chats of a user. To be used by one thread at a time; several processes may use one file.

    Args:
        folder: the user's data folder, made where it lacks.

    Raises:
        StoreError: here and in all methods, when the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._connection, self.notice = open_database(folder)
        self._search = Search(self._connection)
        self._owner = this_process()
        self._purge()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # Chats.

    def entries(self, query: str = "") -> list[ChatEntry]:
        """All chats, the newest first; with a query those with all its words in title or texts."""
        with transaction(self._connection) as connection:
            self._mark_cut()
            rows = connection.execute(f"{_ENTRY} ORDER BY updated_s DESC, rowid DESC").fetchall()
            entries = [_entry(row) for row in rows]
            if not query.strip():
                return entries
            snippets = self._search.snippets(query)
        return [replace(one, snippet=snippets[one.id]) for one in entries if one.id in snippets]

    def chat(self, chat_id: str) -> Chat:
        """A whole chat; NotFoundError."""
        with transaction(self._connection) as connection:
            self._mark_cut()
            return self._chat(connection, chat_id)

    def create(self, settings: Settings) -> Chat:
        """A new chat without messages."""
        with transaction(self._connection) as connection:
            chat_id, now_s = new_id(), time.time()
            connection.execute(
                "INSERT INTO chats VALUES (?, '', ?, NULL, ?, ?, NULL)",
                (chat_id, _settings_json(settings), now_s, now_s),
            )
            return self._chat(connection, chat_id)

    def change(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        settings: Settings | None = None,
        leaf_id: str | None = None,
    ) -> Chat:
        """Change what is given; a leaf may be any message: its newest descendant is shown. NotFoundError."""
        with transaction(self._connection) as connection:
            chat = self._chat(connection, chat_id)
            if title is not None:
                connection.execute("UPDATE chats SET title = ? WHERE id = ?", (title, chat_id))
            if settings is not None:
                connection.execute(
                    "UPDATE chats SET settings = ? WHERE id = ?", (_settings_json(settings), chat_id)
                )
            if leaf_id is not None:
                messages = {message.id: message for message in chat.messages}
                if leaf_id not in messages:
                    raise NotFoundError(f"the chat has no message {leaf_id!r}")
                self._show(connection, chat_id, newest_leaf(messages, leaf_id))
            return self._chat(connection, chat_id)

    def delete(self, chat_id: str) -> None:
        """Take a chat off the list; it can be restored for a day at least. NotFoundError."""
        with transaction(self._connection) as connection:
            self._chat(connection, chat_id)
            connection.execute("UPDATE chats SET deleted_s = ? WHERE id = ?", (time.time(), chat_id))

    def restore(self, chat_id: str) -> Chat:
        """Undo `delete`; NotFoundError."""
        with transaction(self._connection) as connection:
            connection.execute("UPDATE chats SET deleted_s = NULL WHERE id = ?", (chat_id,))
            return self._chat(connection, chat_id)

    def add_chats(self, chats: Iterable[Chat]) -> list[str]:
        """Take in chats with all their messages, whose ids must be new; returns their ids."""
        with transaction(self._connection) as connection:
            return [self._add_chat(connection, chat) for chat in chats]

    # Messages.

    def version(self) -> int:
        """A number that is another one when another process has changed anything."""
        with transaction(self._connection) as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def message(self, message_id: str) -> Message:
        """One message of a chat that is not deleted; NotFoundError."""
        with transaction(self._connection) as connection:
            return self._message(connection, message_id)

    def way_to(self, message_id: str) -> tuple[Settings, list[Message]]:
        """The chat's settings, and the branch that ends with this message; NotFoundError."""
        with transaction(self._connection) as connection:
            chat = self._chat(connection, self._message(connection, message_id).chat_id)
            return chat.settings, branch({message.id: message for message in chat.messages}, message_id)

    def ask(
        self, chat_id: str, parent_id: str | None, text: str, attachment_ids: Sequence[str] = ()
    ) -> tuple[Message, Message]:
        """A new question after an answer (None: a first one), and its answer, empty as yet; both are shown.

        Raises:
            NotFoundError: chat, parent or attachment.
            NotPossibleError: the parent is no answer.
            BeingAnsweredError: the parent is not complete.
        """
        with transaction(self._connection) as connection:
            chat = self._chat(connection, chat_id)
            if parent_id is not None:
                parent = self._message(connection, parent_id)
                if parent.chat_id != chat_id:
                    raise NotFoundError(f"the chat has no message {parent_id!r}")
                if parent.role != "assistant":
                    raise NotPossibleError("parent_id must be an answer's: a question follows an answer")
                if parent.is_live:
                    raise BeingAnsweredError
            files = tuple(self._attachment(connection, one) for one in attachment_ids)
            question = Message(new_id(), chat_id, parent_id, "user", time.time(), text, attachments=files)
            self._insert(connection, question)
            if not chat.entry.title:
                title = make_title(text or files[0].name)
                connection.execute("UPDATE chats SET title = ? WHERE id = ?", (title, chat_id))
            return question, self._new_answer(connection, question)

    def retry(self, answer_id: str) -> Message:
        """Another answer to the question of this one, which is shown; NotFoundError, NotPossibleError."""
        with transaction(self._connection) as connection:
            answer = self._answer(connection, answer_id)
            assert answer.parent_id is not None
            return self._new_answer(connection, self._message(connection, answer.parent_id))

    def reopen(self, answer_id: str) -> Message:
        """Let an answer that ended be written on.

        Raises:
            NotFoundError, NotPossibleError: it is a question.
            BeingAnsweredError: it is being written.
        """
        with transaction(self._connection) as connection:
            answer = self._answer(connection, answer_id)
            if answer.is_live:
                raise BeingAnsweredError
            answer = replace(answer, state="waiting", error=None)
            self._update(connection, answer)
            return answer

    def save(self, messages: Iterable[Message]) -> None:
        """Write down how far answers have come; what was removed meanwhile stays removed."""
        with transaction(self._connection) as connection:
            for message in messages:
                self._update(connection, message)

    # Attachments and presets.

    def attach(self, name: str, kind: str, text: str) -> Attachment:
        """Keep a file's text for a question to come."""
        with transaction(self._connection) as connection:
            attachment_id = new_id()
            row = (attachment_id, name, kind, text, time.time())
            connection.execute("INSERT INTO attachments VALUES (?, ?, ?, ?, ?)", row)
            return self._attachment(connection, attachment_id)

    def presets(self) -> list[tuple[str, str]]:
        """System prompts (name, text), by name."""
        with transaction(self._connection) as connection:
            return connection.execute("SELECT name, text FROM presets ORDER BY name").fetchall()

    def set_preset(self, name: str, text: str) -> None:
        """Keep a system prompt under a name."""
        with transaction(self._connection) as connection:
            connection.execute("INSERT OR REPLACE INTO presets VALUES (?, ?)", (name, text))

    def remove_preset(self, name: str) -> None:
        """Forget a system prompt; NotFoundError."""
        with transaction(self._connection) as connection:
            if not connection.execute("DELETE FROM presets WHERE name = ?", (name,)).rowcount:
                raise NotFoundError(f"there is no preset {name!r}")

    # Parts of transactions.

    def _chat(self, connection: sqlite3.Connection, chat_id: str) -> Chat:
        row = connection.execute(f"{_ENTRY} AND id = ?", (chat_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"there is no chat {chat_id!r}: it may have been deleted")
        settings, leaf_id = connection.execute(
            "SELECT settings, leaf_id FROM chats WHERE id = ?", (chat_id,)
        ).fetchone()
        rows = connection.execute(f"{_MESSAGE} WHERE chat_id = ? ORDER BY seq", (chat_id,)).fetchall()
        files: dict[str, list[Attachment]] = {}
        for message_id, *fields in connection.execute(
            """SELECT message_id, attachments.id, name, kind, attachments.text FROM messages
            JOIN message_attachments ON message_id = messages.id
            JOIN attachments ON attachments.id = attachment_id WHERE chat_id = ? ORDER BY position""",
            (chat_id,),
        ):
            files.setdefault(message_id, []).append(Attachment(*fields))
        messages = tuple(_message(row, files.get(row[0], ())) for row in rows)
        entry = _entry(row)
        return Chat(entry, Settings(**json.loads(settings)), leaf_id, messages)

    def _message(self, connection: sqlite3.Connection, message_id: str) -> Message:
        row = connection.execute(
            f"{_MESSAGE} WHERE id = ? AND chat_id IN (SELECT id FROM chats WHERE deleted_s IS NULL)",
            (message_id,),
        ).fetchone()
        if row is None:
            raise NotFoundError(f"there is no message {message_id!r}")
        files = connection.execute(
            """SELECT id, name, kind, text FROM attachments JOIN message_attachments ON id = attachment_id
            WHERE message_id = ? ORDER BY position""",
            (message_id,),
        )
        return _message(row, [Attachment(*fields) for fields in files])

    def _answer(self, connection: sqlite3.Connection, message_id: str) -> Message:
        message = self._message(connection, message_id)
        if message.role != "assistant":
            raise NotPossibleError(
                "this is a question: it can be asked again in other words, but not answered on"
            )
        return message

    def _new_answer(self, connection: sqlite3.Connection, question: Message) -> Message:
        answer = Message(
            new_id(), question.chat_id, question.id, "assistant", time.time(), "", state="waiting"
        )
        self._insert(connection, answer)
        self._show(connection, answer.chat_id, answer.id)
        connection.execute("UPDATE chats SET updated_s = ? WHERE id = ?", (answer.created_s, answer.chat_id))
        return answer

    def _add_chat(self, connection: sqlite3.Connection, chat: Chat) -> str:
        entry = chat.entry
        connection.execute(
            "INSERT INTO chats VALUES (?, ?, ?, ?, ?, ?, NULL)",
            (
                entry.id,
                entry.title,
                _settings_json(chat.settings),
                chat.leaf_id,
                entry.created_s,
                entry.updated_s,
            ),
        )
        for message in chat.messages:
            for file in message.attachments:
                connection.execute(
                    "INSERT INTO attachments VALUES (?, ?, ?, ?, ?)",
                    (file.id, file.name, file.kind, file.text, message.created_s),
                )
            self._insert(connection, message)
        return entry.id

    def _insert(self, connection: sqlite3.Connection, message: Message) -> None:
        connection.execute(
            """INSERT INTO messages (id, chat_id, parent_id, role, created_s, text, thought, thought_s,
            state, error, figures, server) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
            (
                message.id,
                message.chat_id,
                message.parent_id,
                message.role,
                message.created_s,
                *self._growing(message),
            ),
        )
        for position, file in enumerate(message.attachments):
            row = (message.id, position, file.id)
            connection.execute("INSERT INTO message_attachments VALUES (?, ?, ?)", row)

    def _update(self, connection: sqlite3.Connection, message: Message) -> None:
        connection.execute(
            """UPDATE messages SET text = ?, thought = ?, thought_s = ?, state = ?, error = ?, figures = ?,
            server = ? WHERE id = ?""",
            (*self._growing(message), message.id),
        )

    def _growing(self, message: Message) -> tuple[object, ...]:
        figures = None if message.figures is None else json.dumps(asdict(message.figures))
        server = self._owner if message.is_live else None
        return (
            message.text,
            message.thought,
            message.thought_s,
            message.state,
            message.error,
            figures,
            server,
        )

    def _show(self, connection: sqlite3.Connection, chat_id: str, leaf_id: str) -> None:
        connection.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (leaf_id, chat_id))

    def _attachment(self, connection: sqlite3.Connection, attachment_id: str) -> Attachment:
        row = connection.execute(
            "SELECT id, name, kind, text FROM attachments WHERE id = ?", (attachment_id,)
        ).fetchone()
        if row is None:
            raise NotFoundError(f"there is no attachment {attachment_id!r}: attach the file again")
        return Attachment(*row)

    def _mark_cut(self) -> None:
        """What a process wrote that lives no more ends where it was saved last."""
        owners = self._connection.execute(
            "SELECT DISTINCT server FROM messages WHERE state IN ('waiting', 'streaming')"
        ).fetchall()
        for (owner,) in owners:
            if owner != self._owner and not is_alive(owner):
                self._connection.execute(
                    """UPDATE messages SET state = 'cut', server = NULL
                    WHERE state IN ('waiting', 'streaming') AND server IS ?""",
                    (owner,),
                )

    def _purge(self) -> None:
        """Remove for good what was deleted long ago, and files that no question needs."""
        before_s = time.time() - DELETED_FOR_S
        with transaction(self._connection) as connection:
            self._mark_cut()
            connection.execute("DELETE FROM chats WHERE deleted_s < ?", (before_s,))
            connection.execute(
                """DELETE FROM attachments WHERE created_s < ?
                AND id NOT IN (SELECT attachment_id FROM message_attachments)""",
                (before_s,),
            )


def new_id() -> str:
    """An id that nobody has."""
    return secrets.token_hex(8)


def _message(row: Sequence[Any], files: Iterable[Attachment]) -> Message:
    *fields, figures = row
    named: dict[str, Any] = dict(zip(_COLUMNS, fields, strict=False))
    named["figures"] = None if figures is None else Figures(**json.loads(figures))
    return Message(**named, attachments=tuple(files))


def _entry(row: Sequence[Any]) -> ChatEntry:
    chat_id, title, created_s, updated_s, is_streaming = row
    return ChatEntry(chat_id, title, created_s, updated_s, bool(is_streaming))


def _settings_json(settings: Settings) -> str:
    return json.dumps(asdict(settings))
