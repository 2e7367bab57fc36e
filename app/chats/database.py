"""The file of the chats: opened, migrated and guarded; its thread; its errors in sentences."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FILE_NAME = "chats.sqlite"
BUSY_TIMEOUT_S = 10.0  # for another server on the same file; its transactions take milliseconds

# From nothing (version 0) on, one version after the other; never changed once released, only added to.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE chats (
            id TEXT PRIMARY KEY, title TEXT NOT NULL, settings TEXT NOT NULL, leaf_id TEXT,
            created_s REAL NOT NULL, updated_s REAL NOT NULL, deleted_s REAL)""",
        """CREATE TABLE messages (
            seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
            chat_id TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
            parent_id TEXT REFERENCES messages(id), -- no cascade: SQLite follows only 1,000 levels
            role TEXT NOT NULL, created_s REAL NOT NULL, text TEXT NOT NULL, thought TEXT NOT NULL,
            thought_s REAL, state TEXT NOT NULL, error TEXT, figures TEXT, server TEXT)""",
        "CREATE INDEX messages_of_chat ON messages(chat_id)",
        "CREATE INDEX messages_of_parent ON messages(parent_id)",
        "CREATE INDEX live_messages ON messages(chat_id) WHERE state IN ('waiting', 'streaming')",
        """CREATE TABLE attachments (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
            created_s REAL NOT NULL)""",
        """CREATE TABLE message_attachments (
            message_id TEXT NOT NULL REFERENCES messages(id) ON DELETE CASCADE, position INTEGER NOT NULL,
            attachment_id TEXT NOT NULL REFERENCES attachments(id),
            PRIMARY KEY (message_id, position)) WITHOUT ROWID""",
        "CREATE INDEX messages_of_attachment ON message_attachments(attachment_id)",
    ),
    ("ALTER TABLE messages ADD COLUMN rounds TEXT",),
)


class StoreError(OSError):
    """The file of the chats cannot be used as wished; the message says why and what to do."""


def open_database(folder: Path) -> tuple[sqlite3.Connection, str | None]:
    """Open the file in this folder, for use in any one thread at a time; both are made where they lack.

    Returns also what its user should know: a damaged file has been put aside. Raises StoreError.
    """
    file = folder / FILE_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # chats are private
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"the chats cannot be kept in {folder}: {reason}. Name another folder in NEO_DESKTOP_DATA"
        ) from error
    try:
        return _connect(file), None
    except sqlite3.DatabaseError as error:
        if _code(error) not in _DAMAGED:
            raise StoreError(explain(error, file)) from error
    aside = _put_aside(file)
    notice = f"The file of your chats was damaged. It has been renamed to {aside}, and a new one was begun."
    logger.warning(notice)
    try:
        return _connect(file), notice
    except sqlite3.Error as error:
        raise StoreError(explain(error, file)) from error


_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error, file: Path | str = "the file of the chats") -> str:
    """Return the error as a sentence for the owner of the chats."""
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return f"{file} could not be written: the disk is full. Make room on it"
    if code in _IN_USE:
        return f"{file} is in use by another program for a long time: end that program"
    if code == sqlite3.SQLITE_READONLY:
        return f"{file} may not be written: change its permissions"
    if code in _DAMAGED:
        return f"{file} is damaged: start neo-desktop anew, which puts the file aside"
    return f"{file} cannot be used: {error}"


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Carry out all changes or none; an inner transaction joins the outer one. StoreError: none."""
    if connection.in_transaction:
        yield
        return
    try:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
    except sqlite3.Error as error:
        raise StoreError(explain(error)) from error


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _set_up(connection)
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            damage = sqlite3.DatabaseError("its pages are damaged")
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    connection.create_function("holds", 2, lambda text, word: word in text.casefold(), deterministic=True)
    connection.execute("PRAGMA foreign_keys = ON")
    # What is committed stays, even when the power fails; commits are few, so the disk's time for it is small.
    connection.execute("PRAGMA synchronous = FULL")
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:  # SQLite does not wait by itself when two open a new file at once
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if _code(error) not in _IN_USE or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    with connection:  # with SQLite's own errors: they tell damage from other trouble
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StoreError(
                "the chats were written by a newer neo-desktop: update this one, or name another folder in "
                "NEO_DESKTOP_DATA"
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        if version < len(MIGRATIONS):
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _put_aside(file: Path) -> Path:
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    aside = file.with_name(f"{file.stem}-damaged-{stamp}{file.suffix}")
    for end in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            file.with_name(file.name + end).rename(aside.with_name(aside.name + end))
    return aside


class FunctionThread:
    """A thread that calls functions one after the other: the event loop never waits for the file."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown()
