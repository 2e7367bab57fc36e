"""News for pages: many sources, one stream per page.

    publish() ──→ one box per subscriber ──→ GET /api/events, as server-sent events

A box holds what its page has not read yet, by key: news with the same key replaces older news, or joins it.
So a slow page gets the last state rather than all of them, and its box does not grow. All of this belongs to
the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from fastapi import APIRouter, Request

from neo_desktop.app.web.connection import EventStream, event

MAX_UNREAD = 1000  # keys; beyond that the stream ends, and the page connects anew and gets the state as it is

Json = Any
View = Callable[[], Awaitable[Json]]
Merge = Callable[[Json, Json], Json]  # older, newer → both in one


class Subscription:
    """One page's box; leave the `async with` when the page is gone. Iterating gives (name, data).

    Args:
        chat_id: whose news it wants beside everybody's.
        extras: names of news that are made only for those who ask.
    """

    def __init__(self, hub: "Hub", chat_id: str | None, extras: frozenset[str]) -> None:
        self.chat_id = chat_id
        self.extras = extras
        self._hub = hub
        self._unread: dict[str, tuple[str, Json]] = {}
        self._has_news = asyncio.Event()
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hub.leave(self)

    async def __aiter__(self) -> AsyncIterator[tuple[str, Json]]:
        while True:
            while self._unread:
                yield self._unread.pop(next(iter(self._unread)))
            if self._is_over:
                return
            self._has_news.clear()
            await self._has_news.wait()

    def put(self, key: str, name: str, data: Json, merge: Merge | None = None) -> None:
        """Take in news; what has the same key is replaced and keeps its place."""
        if merge is not None and key in self._unread:
            data = merge(self._unread[key][1], data)
        self._unread[key] = (name, data)
        if len(self._unread) > MAX_UNREAD:
            self._unread.clear()
            self._is_over = True
        self._has_news.set()

    def put_first(self, key: str, name: str, data: Json) -> None:
        """Take in a view of the whole, which news since the subscription build on."""
        news = self._unread.pop(key, (name, {}))[1]
        self._unread = {key: (name, data | news), **self._unread}
        self._has_news.set()

    def drop(self, key: str) -> None:
        """Forget news that something newer contains."""
        self._unread.pop(key, None)

    def end(self) -> None:
        """End the stream after what is unread."""
        self._is_over = True
        self._has_news.set()


class Hub:
    """Where sources publish and pages subscribe."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._greetings: dict[str, View] = {}
        self._joined = asyncio.Event()
        self._is_closed = False

    def greet(self, name: str, view: View) -> None:
        """Send a view under this name to everybody who connects, before any news."""
        self._greetings[name] = view

    def publish(
        self,
        name: str,
        data: Json,
        chat_id: str | None = None,
        *,
        key: str | None = None,
        merge: Merge | None = None,
        replaces: str | None = None,
    ) -> None:
        """Tell the pages that it concerns.

        Args:
            name: of the event.
            data: to be sent as JSON; not to be changed afterwards.
            chat_id: only those who look at this chat; None: all.
            key: news with the same key is superseded; None: the name.
            merge: how older news of the key, unread as yet, joins this.
            replaces: key of other news that this contains.
        """
        for subscription in self._listeners(name, chat_id):
            if replaces is not None:
                subscription.drop(replaces)
            subscription.put(key or name, name, data, merge)

    def has_listeners(self, name: str = "", chat_id: str | None = None) -> bool:
        """Whether anybody would get news of this name (or of this chat)."""
        return any(True for _ in self._listeners(name, chat_id))

    def chats_looked_at(self) -> set[str]:
        """Ids of the chats that anybody looks at."""
        return {one.chat_id for one in self._subscriptions if one.chat_id is not None}

    async def listened(self, name: str = "") -> None:
        """Wait until somebody would get news of this name."""
        while not self.has_listeners(name):
            self._joined.clear()
            await self._joined.wait()

    async def subscribe(self, chat_id: str | None = None, with_engine: bool = False) -> Subscription:
        """A new page; everybody's greetings come first."""
        extras = frozenset({"engine"} if with_engine else ())
        subscription = Subscription(self, chat_id, extras)
        self._subscriptions.add(subscription)  # first, so that no news is lost while the greetings are made
        self._joined.set()
        if self._is_closed:
            subscription.end()
            return subscription
        try:
            for name, view in self._greetings.items():
                subscription.put_first(name, name, await view())
        except BaseException:
            self.leave(subscription)
            raise
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """A page is gone."""
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End all streams, those to come included: the server ends."""
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.end()

    def _listeners(self, name: str, chat_id: str | None) -> list[Subscription]:
        return [
            one
            for one in self._subscriptions
            if (chat_id is None or one.chat_id == chat_id) and (name not in EXTRAS or name in one.extras)
        ]


EXTRAS = frozenset({"engine"})  # names that only those get who ask


def routes(hub: Hub, whole_chat: Callable[[str], Awaitable[Json | None]]) -> APIRouter:
    """GET /events.

    Args:
        hub: whose news is sent.
        whole_chat: chat's id → the chat with all messages, None where there is none; sent at the beginning.
    """
    router = APIRouter()

    @router.get("/events")
    async def events(request: Request) -> EventStream:
        chat_id = request.query_params.get("chat") or None
        with_engine = request.query_params.get("engine") == "1"
        subscription = await hub.subscribe(chat_id, with_engine)
        try:
            chat = None if chat_id is None else await whole_chat(chat_id)
        except BaseException:
            hub.leave(subscription)
            raise
        if chat is not None:
            subscription.put_first("chat", "chat", chat)
        return EventStream(_stream(subscription), subscription)

    return router


async def _stream(subscription: Subscription) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    async for name, data in subscription:
        yield event(data, name)
