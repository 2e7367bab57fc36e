"""News on its way from sources to pages."""

import asyncio
from typing import Any

from neo_desktop.app.web import events
from neo_desktop.app.web.events import Hub, Subscription


async def unread(subscription: Subscription) -> list[tuple[str, Any]]:
    """What a page would read, to the end of its stream."""
    subscription.end()
    return [news async for news in subscription]


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


def test_each_page_gets_what_concerns_it() -> None:
    async def scenario() -> None:
        hub = Hub()
        list_only, one, other = [await hub.subscribe(chat_id) for chat_id in (None, "1", "2")]
        engine = await hub.subscribe("1", with_engine=True)
        hub.publish("chats", {"all": 1})
        hub.publish("node", {"id": "a"}, "1")
        hub.publish("engine", {"busy": True})
        assert await unread(list_only) == await unread(other) == [("chats", {"all": 1})]
        assert await unread(one) == [("chats", {"all": 1}), ("node", {"id": "a"})]
        assert (await unread(engine))[-1] == ("engine", {"busy": True})

    run(scenario())


def test_a_slow_page_gets_the_last_state_only() -> None:
    async def scenario() -> None:
        hub = Hub()
        page = await hub.subscribe("1")
        for number in range(10_000):
            hub.publish("chats", number)
            hub.publish("delta", [number], "1", key="delta a", merge=lambda older, newer: older + newer)
        assert await unread(page) == [("chats", 9999), ("delta", list(range(10_000)))]

    run(scenario())


def test_news_that_contains_older_news_takes_its_place() -> None:
    async def scenario() -> None:
        hub = Hub()
        page = await hub.subscribe("1")
        hub.publish("delta", 1, "1", key="delta a")
        hub.publish("node", 2, "1", key="node a", replaces="delta a")
        assert await unread(page) == [("node", 2)]

    run(scenario())


def test_a_page_that_reads_nothing_is_let_go_of() -> None:
    async def scenario() -> None:
        hub = Hub()
        page = await hub.subscribe("1")
        for number in range(events.MAX_UNREAD + 1):
            hub.publish("node", number, "1", key=f"node {number}")
        assert [news async for news in page] == []  # it has ended: the page connects anew

    run(scenario())


def test_whoever_connects_is_greeted_first() -> None:
    async def scenario() -> None:
        hub = Hub()

        async def view() -> dict[str, int]:
            hub.publish("node", "meanwhile", "1", key="node a")
            hub.publish("models", {"newer": 1})
            return {"older": 1, "newer": 0}

        hub.greet("models", view)
        page = await hub.subscribe("1")
        assert await unread(page) == [("models", {"older": 1, "newer": 1}), ("node", "meanwhile")]

    run(scenario())


def test_sources_rest_while_nobody_listens() -> None:
    async def scenario() -> None:
        hub = Hub()
        waiting = asyncio.create_task(hub.listened("engine"))
        plain = await hub.subscribe("1")
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not hub.has_listeners("engine")
        assert hub.has_listeners("node", "1")
        assert not hub.has_listeners("node", "2")
        async with await hub.subscribe(None, with_engine=True):
            await waiting
            assert hub.has_listeners("engine")
        assert not hub.has_listeners("engine")
        async with plain:
            pass
        assert not hub.has_listeners()

    run(scenario())


def test_streams_tell_the_news_and_end_with_the_server() -> None:
    async def scenario() -> None:
        hub = Hub()
        stream = events._stream(await hub.subscribe())
        assert await anext(stream) == b"retry: 1000\n\n"
        hub.publish("chats", {"text": "a\nb é"})
        assert await anext(stream) == 'event: chats\ndata: {"text":"a\\nb é"}\n\n'.encode()
        hub.close()
        assert [line async for line in stream] == []
        late = await hub.subscribe()
        assert [news async for news in late] == []

    run(scenario())
