"""Followers wait here for changes of what they show."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator


class News:
    """Wakes the followers of a topic. Belongs to the event loop.

    Topics: `CHATS`, `MODELS`, `SELFTEST`, `TOOLS`, and for each chat `chat_topic` (its messages, settings or
    shown branch changed) and `text_topic` (an answer grew). A follower reads the present state itself, so
    that a slow one skips states and queues nothing.
    """

    def __init__(self) -> None:
        self._followers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    @contextlib.contextmanager
    def follow(self, *topics: str) -> Iterator[asyncio.Event]:
        """Yield an event that each change of a topic sets; the follower clears it."""
        changed = asyncio.Event()
        for topic in topics:
            self._followers[topic].add(changed)
        try:
            yield changed
        finally:
            for topic in topics:
                self._followers[topic].discard(changed)
                if not self._followers[topic]:
                    del self._followers[topic]

    def tell(self, topic: str) -> None:
        for changed in self._followers.get(topic, ()):
            changed.set()


CHATS, MODELS, SELFTEST, TOOLS = "chats", "models", "selftest", "tools"


def chat_topic(chat_id: str) -> str:
    return f"chat {chat_id}"


def text_topic(chat_id: str) -> str:
    return f"text {chat_id}"
