"""The handlers of the page's events: each takes what the components show and returns what they show next."""

import html
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr
from openai import OpenAIError

from neo_desktop.ui.chat import Reply, connect, explain, figures, first_model, stream_reply
from neo_desktop.ui.messages import Message, answer, question, to_send, up_to_last_question

FRAME_S = 1 / 30  # the page is redrawn at most this often: a faster model shows several tokens at once

# field of the request, label, what it does, type
SETTINGS: list[tuple[str, str, str, type[int] | type[float]]] = [
    ("temperature", "Temperature", "0 is the most predictable", float),
    ("top_p", "Top-p", "Likeliest tokens up to this total", float),
    ("top_k", "Top-k", "Likeliest tokens up to this many", int),
    ("min_p", "Min-p", "Share of the likeliest token's chance", float),
    ("repetition_penalty", "Repetition penalty", "Above 1: fewer repeats", float),
    ("max_tokens", "Max tokens", "Longest answer", int),
    ("seed", "Seed", "Same seed, same answer", int),
]

# For the controls (message box, new chat, list of chats, delete) and the conversation, in this order:
# a value, gr.update() or gr.skip() each.
Updates = list[Any]


def parse_settings(texts: Sequence[str]) -> dict[str, float | None]:
    """The settings as typed, in the order of SETTINGS; None where empty, ValueError where no number."""
    settings: dict[str, float | None] = {}
    for (field, label, _, number), text in zip(SETTINGS, texts, strict=True):
        try:
            settings[field] = number(text) if text.strip() else None
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise ValueError(f"{label} is {kind}, not {text.strip()!r}: change it in the settings.") from None
    return settings


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

    async def send(self, text: str, shown: list[Message], *settings: str) -> AsyncGenerator[Updates, None]:
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

    async def retry(self, shown: list[Message], *settings: str) -> AsyncGenerator[Updates, None]:
        """Another answer to the last question."""
        async with aclosing(self._answer(up_to_last_question(shown), *settings)) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self, shown: list[Message], system_prompt: str, *settings: str
    ) -> AsyncGenerator[Updates, None]:
        # The conversation, which ends with a question, as the answer grows.
        unchanged = [gr.skip()] * 4
        reply, drawn_s = Reply(), 0.0
        yield [*busy(), [*shown, answer("", "waiting for the first token", "waiting")]]
        try:
            model = await first_model(self._client)
            messages = to_send(shown, system_prompt)
            replies = stream_reply(self._client, model.name, messages, parse_settings(settings))
            async with aclosing(replies):
                async for reply in replies:
                    if reply.text and time.monotonic() - drawn_s >= FRAME_S:
                        yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
                        drawn_s = time.monotonic()
            yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
        except (OpenAIError, ValueError) as error:
            yield [*unchanged, [*shown, answer(reply.text, explain(error, self._base_url), "error")]]
