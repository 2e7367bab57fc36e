"""The handlers of the page's events: each takes what the components show and returns what they show next."""

import html
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import gradio as gr
from openai import OpenAIError

from neo_desktop.ui.chat import Reply, connect, explain, figures, first_model, stream_reply
from neo_desktop.ui.messages import Message, answer, question, to_send, up_to_last_question

FRAME_S = 1 / 30  # the page is redrawn at most this often: a faster model shows several tokens at once

# field of the request, label, what it does, digits after the point (None: any)
SETTINGS: list[tuple[str, str, str, int | None]] = [
    ("temperature", "Temperature", "0 is the most predictable", None),
    ("top_p", "Top-p", "Likeliest tokens up to this total", None),
    ("top_k", "Top-k", "Likeliest tokens up to this many", 0),
    ("min_p", "Min-p", "Share of the likeliest token's chance", None),
    ("repetition_penalty", "Repetition penalty", "Above 1: fewer repeats", None),
    ("max_tokens", "Max tokens", "Longest answer", 0),
    ("seed", "Seed", "Same seed, same answer", 0),
]

# For the controls (message box, new chat, list of chats, delete) and the conversation, in this order:
# a value, gr.update() or gr.skip() each.
Updates = list[Any]


def idle() -> Updates:
    """The controls while nothing is being answered."""
    enabled = gr.update(interactive=True)
    return [gr.update(submit_btn="Send", stop_btn=False), enabled, enabled, enabled]


def busy(**box: Any) -> Updates:
    """The controls while an answer is coming: only stop; box: more changes of the message box."""
    disabled = gr.update(interactive=False)
    return [gr.update(submit_btn=False, stop_btn="Stop", **box), disabled, disabled, disabled]


class Handlers:
    """The handlers that ask the server."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url
        self._client = connect(base_url, api_key)

    async def header(self) -> str:
        """The model's name and context length, or why there is none."""
        try:
            model = await first_model(self._client)
        except (OpenAIError, ValueError) as error:
            return f'<span class="error">{html.escape(explain(error, self._base_url))}</span>'
        context = f" · {model.context_tokens:,} tokens of context" if model.context_tokens else ""
        return f"<strong>{html.escape(model.name)}</strong>{context}"

    async def send(self, text: str, shown: list[Message], *settings: Any) -> AsyncGenerator[Updates, None]:
        """A new question; an empty one is ignored."""
        if not text.strip():
            yield [gr.skip()] * 5
            return
        shown = [*shown, question(text)]
        yield [*busy(value=""), shown]
        async with aclosing(self._answer(shown, *settings)) as updates:
            async for update in updates:
                yield update

    async def edit(
        self, edited: gr.EditData, shown: list[Message], *settings: Any
    ) -> AsyncGenerator[Updates, None]:
        """A past question in new words: what followed it is answered anew."""
        assert isinstance(edited.index, int)  # a pair in gradio's other message format
        shown = [*shown[: edited.index], question(edited.value)]
        async with aclosing(self._answer(shown, *settings)) as updates:
            async for update in updates:
                yield update

    async def retry(self, shown: list[Message], *settings: Any) -> AsyncGenerator[Updates, None]:
        """Another answer to the last question."""
        async with aclosing(self._answer(up_to_last_question(shown), *settings)) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self, shown: list[Message], system_prompt: str, *values: float | None
    ) -> AsyncGenerator[Updates, None]:
        # The conversation, which ends with a question, as the answer grows.
        settings = {name: value for (name, *_), value in zip(SETTINGS, values, strict=True)}
        unchanged = [gr.skip()] * 4
        reply, drawn_s = Reply(), 0.0
        yield [*busy(), [*shown, answer("", "waiting for the first token", "waiting")]]
        try:
            model = await first_model(self._client)
            replies = stream_reply(self._client, model.name, to_send(shown, system_prompt), settings)
            async with aclosing(replies):
                async for reply in replies:
                    if reply.text and time.monotonic() - drawn_s >= FRAME_S:
                        yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
                        drawn_s = time.monotonic()
            yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
        except (OpenAIError, ValueError) as error:
            yield [*unchanged, [*shown, answer(reply.text, explain(error, self._base_url), "error")]]
