"""Words looked for in titles and texts."""

import sqlite3

MIN_INDEXED_CHARS = 3  # the index knows trigrams; shorter words are looked for in every text
SNIPPET_CHARS = 80


class Search:
    """Finds chats on a connection whose transactions are its owner's business."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def snippets(self, query: str) -> dict[str, str]:
        """chat_id -> the text around a hit, for chats with all the words, each in the title or in some text.

        The longest word decides what is shown. Case does not matter, nor do parts of words.
        """
        found: dict[str, str] | None = None
        words = query.replace("\0", " ").split()  # SQLite ends patterns there
        for word in sorted(set(words), key=len, reverse=True):
            hits = self._in_texts(word)
            for chat_id, title in self._in_titles(word):
                hits.setdefault(chat_id, title)
            found = hits if found is None else {id_: text for id_, text in found.items() if id_ in hits}
        return found or {}

    def _in_titles(self, word: str) -> list[tuple[str, str]]:
        return self._connection.execute(
            "SELECT id, title FROM chats WHERE title LIKE ? ESCAPE '\\'", (_like(word),)
        ).fetchall()

    def _in_texts(self, word: str) -> dict[str, str]:
        if len(word) >= MIN_INDEXED_CHARS:
            quoted = '"' + word.replace('"', '""') + '"'
            rows = self._connection.execute(
                """SELECT chat_id, messages.text FROM messages JOIN (SELECT rowid AS hit FROM found
                WHERE found MATCH ?) ON hit = seq ORDER BY seq""",
                (quoted,),
            )
        else:
            rows = self._connection.execute(
                "SELECT chat_id, text FROM messages WHERE text LIKE ? ESCAPE '\\' ORDER BY seq",
                (_like(word),),
            )
        return {chat_id: _around(text, word) for chat_id, text in rows}


def _like(word: str) -> str:
    for special in "\\%_":
        word = word.replace(special, "\\" + special)
    return f"%{word}%"


def _around(text: str, word: str) -> str:
    at = max(text.casefold().find(word.casefold()), 0)
    start = max(at - SNIPPET_CHARS // 2, 0)
    end = start + SNIPPET_CHARS
    piece = " ".join(text[start:end].split())
    return ("…" if start else "") + piece + ("…" if end < len(text) else "")
