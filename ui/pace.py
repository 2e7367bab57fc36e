"""Lets a generator of the page wait for a slow reader: Gradio itself keeps all that is yielded."""

import asyncio

import gradio as gr
from gradio.context import LocalContext

MAX_UNREAD = 4  # messages of a session
PATIENCE_S = 30.0
LOOK_S = 0.5


async def is_read(request: gr.Request) -> bool:
    """Wait until the session has read what was yielded before; False: it reads no more."""
    blocks = LocalContext.blocks.get()
    assert blocks is not None
    unread = blocks._queue.pending_messages_per_session.get(request.session_hash)
    waited_s = 0.0
    while unread is not None and unread.qsize() > MAX_UNREAD:
        if waited_s >= PATIENCE_S:
            return False
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
    return True
