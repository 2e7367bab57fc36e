"""The chats' file: saving, searching and deleting chats, and handling of a damaged or foreign file."""

import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from neo_desktop.app.chats.database import FILE_NAME, StoreError
from neo_desktop.app.chats.messages import (
    Chat,
    Figures,
    Message,
    NotFoundError,
    NotPossibleError,
    Settings,
)
from neo_desktop.app.chats.store import DELETED_FOR_S, ChatStore, new_id


def answered(
    store: ChatStore, chat_id: str, question: str, answer: str, parent: str | None = None
) -> Message:
    _, empty = store.ask(chat_id, parent, question)
    figures = Figures(0.25, 30.5, 12, 7, "stop", "a-model")
    whole = Message(
        empty.id,
        chat_id,
        empty.parent_id,
        "assistant",
        empty.created_s,
        answer,
        "hmm",
        1.5,
        figures=figures,
    )
    store.save([whole])
    return whole


def test_everything_is_there_again_after_a_restart(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    settings = Settings("Be brief.", 0.5, 0.9, 40, 0.1, 1.1, 100, 7)
    chat_id = store.create(settings).entry.id
    first = answered(store, chat_id, "one", "1")
    answered(store, chat_id, "two", "2\0\n 💡", first.id)
    answered(store, chat_id, "uno", "I")
    file = store.attach("notes.txt", "text", "some notes")
    store.ask(chat_id, first.id, "three", [file.id])
    before = store.chat(chat_id)
    assert before.settings == settings
    assert before.messages[-2].attachments == (file,)
    store.close()
    with closing(ChatStore(tmp_path)) as again:
        assert again.chat(chat_id) == before  # the last answer still counts as written by this process
        assert again.notice is None


def test_only_their_owner_can_read_chats(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path / "data")) as store:
        store.create(Settings())
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "data").iterdir()}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_search_finds_parts_of_words_in_titles_and_texts(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path)) as store:

        def found(query: str) -> list[str]:
            return [entry.title for entry in store.entries(query)]

        for question, answer in [
            ("Tell me of Ärzte", "An unbelievably long story " * 20 + "with a needle in it."),
            ("第二章の要約", "100 % of it: a_b\\c 'quoted' \"words\""),
            ("Nothing here", "But needles, too."),
        ]:
            answered(store, store.create(Settings()).entry.id, question, answer)
        assert found("NEEDLE") == ["Nothing here", "Tell me of Ärzte"]
        assert found("ärz") == ["Tell me of Ärzte"]
        assert found("needle ärz") == ["Tell me of Ärzte"]
        assert found("章の") == ["第二章の要約"]
        assert found("第二章の") == ["第二章の要約"]
        assert found("0 %") == ["第二章の要約"]
        assert found("a_b") == ["第二章の要約"]
        assert found("a%b") == found("nowhere") == found('" NEAR') == []
        assert found('"words"') == ["第二章の要約"]
        assert found("\0") == []
        (entry,) = store.entries("needle ärz")
        assert entry.snippet is not None
        assert "needle" in entry.snippet
        store.change(entry.id, title="Pinpoint")
        assert found("pinp") == ["Pinpoint"]
        store.delete(entry.id)
        assert found("pinp") == []


def test_a_deleted_chat_can_be_restored_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ChatStore(tmp_path)) as store:
        chat_id = store.create(Settings()).entry.id
        file = store.attach("a.txt", "text", "secret words")
        store.ask(chat_id, None, "with a file", [file.id])
        before = store.chat(chat_id)
        store.delete(chat_id)
        assert store.entries() == []
        for call in (store.chat, store.delete):
            with pytest.raises(NotFoundError, match="deleted"):
                call(chat_id)
        with pytest.raises(NotFoundError):
            store.message(before.messages[0].id)
        with pytest.raises(NotFoundError):
            store.retry(before.messages[1].id)
        assert store.restore(chat_id) == before
        store.delete(chat_id)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + DELETED_FOR_S - 60)
    with closing(ChatStore(tmp_path)) as store:
        assert store.restore(chat_id) == before
        store.delete(chat_id)
    monkeypatch.setattr(time, "time", lambda: now_s + 3 * DELETED_FOR_S)
    with closing(ChatStore(tmp_path)) as store, pytest.raises(NotFoundError):
        store.restore(chat_id)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file_:
        for table in ("chats", "messages", "attachments", "message_attachments"):
            assert file_.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path)) as store:
        chat_id, other_id = (store.create(Settings()).entry.id for _ in range(2))
        answer = answered(store, chat_id, "one", "1")
        assert answer.parent_id is not None
        with pytest.raises(NotPossibleError, match="a question follows an answer"):
            store.ask(chat_id, answer.parent_id, "two")
        with pytest.raises(NotFoundError):
            store.ask(other_id, answer.id, "two")
        for change in (store.retry, store.reopen):
            with pytest.raises(NotPossibleError, match="this is a question"):
                change(answer.parent_id)
        with pytest.raises(NotFoundError, match="attach the file again"):
            store.ask(chat_id, answer.id, "two", ["none"])
        assert len(store.chat(chat_id).messages) == 2  # no trace is left
        with pytest.raises(NotFoundError):
            store.change(chat_id, title="new", leaf_id="none")
        assert store.chat(chat_id).entry.title == "one"


@pytest.mark.parametrize("damage", ["no database", "broken page"])
def test_a_damaged_file_is_put_aside_and_told(tmp_path: Path, damage: str) -> None:
    file = tmp_path / FILE_NAME
    if damage == "no database":
        file.write_bytes(b"this is not a database at all" * 1000)
    else:
        with closing(ChatStore(tmp_path)) as store:
            for number in range(200):
                answered(store, store.create(Settings()).entry.id, f"question {number}", "words " * 100)
        content = bytearray(file.read_bytes())
        content[8192 : len(content) // 2] = os.urandom(len(content) // 2 - 8192)
        file.write_bytes(content)
    before = file.read_bytes()
    with closing(ChatStore(tmp_path)) as store:
        assert store.entries() == []
        assert store.notice is not None
        (aside,) = tmp_path.glob("chats-damaged-*.sqlite")
        assert str(aside) in store.notice
        assert aside.read_bytes() == before
        store.create(Settings())
    with closing(ChatStore(tmp_path)) as store:
        assert len(store.entries()) == 1
        assert store.notice is None


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    ChatStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("PRAGMA user_version = 1000")
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreError, match="newer neo-desktop: update"):
        ChatStore(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_full_disk_is_told_and_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path)) as store:
        chat_id = store.create(Settings()).entry.id
        answer = answered(store, chat_id, "one", "1")
        num_pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {num_pages + 2}")
        with pytest.raises(StoreError, match="the disk is full"):
            store.ask(chat_id, answer.id, "long " * 100_000)
        assert len(store.chat(chat_id).messages) == 2
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.ask(chat_id, answer.id, "long " * 100_000)


def test_a_chat_of_thousands_of_turns_can_be_shown_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ChatStore(tmp_path)) as store:
        entry = store.create(Settings()).entry
        ids = [new_id() for _ in range(3000)]
        turns = tuple(
            Message(one, "long", parent, "assistant" if place % 2 else "user", 0.0, f"turn {place}")
            for place, (one, parent) in enumerate(zip(ids, [None, *ids], strict=False))
        )
        store.add_chats([Chat(replace(entry, id="long", title="long"), Settings(), ids[-1], turns)])
        _, way = store.way_to(ids[-2])
        assert [message.id for message in way] == ids[:-1]
        assert store.change("long", leaf_id=ids[0]).leaf_id == ids[-1]
        store.delete("long")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * DELETED_FOR_S)
    with closing(ChatStore(tmp_path)) as store:
        assert [one.id for one in store.entries()] == [entry.id]
        with pytest.raises(NotFoundError):
            store.restore("long")
