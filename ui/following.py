"""Generators that write parts of a page while a person looks at it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import gradio as gr
from gradio.context import LocalContext

from neo_desktop.app.news import News

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
MAX_UNREAD = 4  # messages of a session
TIMEOUT_S = 30.0
LOOK_S = 0.5


def while_seen(
    shown: gr.HTML, follow: Callable[..., AsyncIterator[Any]], outputs: list[Any], **event: Any
) -> None:
    """Run a generator from the load of the page on, whenever the page is seen.

    Args:
        shown: a panel, which says when the page is hidden and seen.
        follow: ends by itself when the session reads no more, see `is_read`.
        event: more of Gradio's arguments of an event.
    """
    context = gr.context.Context.root_block
    assert context is not None
    begun = [begin(follow, outputs=outputs, **event, **QUIET) for begin in (shown.seen, context.load)]
    shown.hide(None, None, None, cancels=begun, **QUIET)


def follow_panel(shown: gr.HTML, follow: Callable[[], AsyncIterator[str]]) -> None:
    """Let a generator write a panel."""

    async def read(request: gr.Request) -> AsyncIterator[str]:
        async for value in follow():
            yield value
            if not await is_read(request):
                return

    while_seen(shown, read, [shown])


def follow_topic(
    shown: gr.HTML,
    news: News,
    topic: str,
    draw: Callable[[], str],
    first: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Let a panel show what `draw` returns, at each change of a topic, after `first`."""

    async def follow() -> AsyncIterator[str]:
        with news.follow(topic) as changed:
            if first is not None:
                await first()
            while True:
                changed.clear()
                yield draw()
                await changed.wait()

    follow_panel(shown, follow)


async def is_read(request: gr.Request) -> bool:
    """Wait until the session has read what was yielded before; False: it reads no more.

    Gradio itself keeps all that is yielded.
    """
    blocks = LocalContext.blocks.get()
    assert blocks is not None
    unread = blocks._queue.pending_messages_per_session.get(request.session_hash)
    waited_s = 0.0
    while unread is not None and unread.qsize() > MAX_UNREAD:
        if waited_s >= TIMEOUT_S:
            return False
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
    return True
