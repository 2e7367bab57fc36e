"""The page: its layout, and what happens on each of its events."""

import html
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from openai import OpenAIError

from neo_desktop.ui.chat import Reply, connect, explain, figures, first_model, stream_reply
from neo_desktop.ui.messages import Message, answer, question, stopped, to_send, up_to_last_question

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it when it is imported
import gradio as gr  # noqa: E402

HERE = Path(__file__).parent
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
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]

Update = Any  # gradio's own: a value, gr.update() or gr.skip()


class Page:
    """What the page does: each handler takes what the components show and returns what they show next."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url = base_url
        self.client = connect(base_url, api_key)

    async def header(self) -> str:
        """The model's name and context length, or why there is none."""
        try:
            model = await first_model(self.client)
        except (OpenAIError, ValueError) as error:
            return f'<span class="error">{html.escape(explain(error, self.base_url))}</span>'
        context = f" · {model.context_tokens:,} tokens of context" if model.context_tokens else ""
        return f"<strong>{html.escape(model.name)}</strong>{context}"

    async def send(self, text: str, shown: list[Message], *settings: Any) -> AsyncIterator[list[Update]]:
        """A new question; an empty one is ignored."""
        if not text.strip():
            yield [gr.skip()] * 5
            return
        box, *others = busy()
        yield [box | {"value": ""}, *others, gr.skip()]
        async with aclosing(self._answer([*shown, question(text)], *settings)) as updates:
            async for update in updates:
                yield update

    async def edit(self, edited: gr.EditData, shown: list[Message], *settings: Any) -> AsyncIterator[list[Update]]:
        """A past question in new words: what followed it is answered anew."""
        async with aclosing(self._answer([*shown[: edited.index], question(edited.value)], *settings)) as updates:
            async for update in updates:
                yield update

    async def retry(self, shown: list[Message], *settings: Any) -> AsyncIterator[list[Update]]:
        """Another answer to the last question."""
        async with aclosing(self._answer(up_to_last_question(shown), *settings)) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self, shown: list[Message], system_prompt: str, *values: float | None
    ) -> AsyncIterator[list[Update]]:
        # Yields the controls and the conversation, which ends with the question, as its answer grows.
        settings = {name: value for (name, *_), value in zip(SETTINGS, values, strict=True)}
        unchanged = [gr.skip()] * 4
        reply, drawn_s = Reply(), 0.0
        yield [*busy(), [*shown, answer("", "waiting for the first token", "waiting")]]
        try:
            model = await first_model(self.client)
            replies = stream_reply(self.client, model.name, to_send(shown, system_prompt), settings)
            async with aclosing(replies):
                async for reply in replies:
                    if reply.text and time.monotonic() - drawn_s >= FRAME_S:
                        yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
                        drawn_s = time.monotonic()
            yield [*unchanged, [*shown, answer(reply.text, figures(reply))]]
        except (OpenAIError, ValueError) as error:
            yield [*unchanged, [*shown, answer(reply.text, explain(error, self.base_url), "error")]]


def idle() -> list[Update]:
    """The controls while nothing is being answered: message box, new chat, list of chats, delete."""
    enabled = gr.update(interactive=True)
    return [gr.update(submit_btn="Send", stop_btn=False), enabled, enabled, enabled]


def busy() -> list[Update]:
    """The controls while an answer is coming: only stop."""
    disabled = gr.update(interactive=False)
    return [gr.update(submit_btn=False, stop_btn="Stop"), disabled, disabled, disabled]


def build_page(base_url: str, api_key: str | None, title: str = "neo-desktop") -> gr.Blocks:
    """The page for the server at base_url (with its `/v1`); needs the style of `mount`."""
    page = Page(base_url, api_key)
    with gr.Blocks(title=title, fill_height=True, fill_width=True) as blocks:
        with gr.Sidebar(width=300) as sidebar:
            gr.HTML(f'<h1><img src="favicon.ico" alt="">{html.escape(title)}</h1>', elem_id="title")
            new = gr.Button("New chat", variant="primary")
            chats = gr.Radio([], label="Chats", elem_id="chats", interactive=True)
            remove = gr.Button("Delete this chat", size="sm", elem_id="remove")
            with gr.Accordion("Settings", open=False):
                system = gr.Textbox("", label="System prompt", lines=3, max_lines=12, placeholder="none")
                numbers = [
                    gr.Number(label=label, info=info, precision=digits, placeholder="as the model recommends")
                    for _, label, info, digits in SETTINGS
                ]
        header = gr.HTML(elem_id="model")
        chat = gr.Chatbot(
            label="Conversation",
            show_label=False,
            scale=1,
            elem_id="chat",
            buttons=["copy"],
            editable="user",
            group_consecutive_messages=False,  # a thought stays apart, so that copying copies the answer
            latex_delimiters=LATEX,
            reasoning_tags=[("<think>", "</think>")],
            placeholder="<h2>What would you like to know?</h2>",
        )
        box = gr.Textbox(
            "",
            label="Message",
            show_label=False,
            placeholder="Message",
            max_lines=12,
            submit_btn="Send",
            autofocus=True,
            elem_id="box",
        )

        controls = [box, new, chats, remove]
        context = [chat, system, *numbers]
        quiet = {"show_progress": "hidden", "api_visibility": "private"}
        local = {"fn": None, "api_visibility": "private"}
        answers = [
            box.submit(page.send, [box, *context], [*controls, chat], concurrency_limit=None, **quiet),
            chat.edit(page.edit, context, [*controls, chat], concurrency_limit=None, **quiet),
            chat.retry(page.retry, context, [*controls, chat], concurrency_limit=None, **quiet),
        ]
        stop = box.stop(stopped, chat, chat, cancels=answers, queue=False, **quiet)
        for finished in [*answers, stop]:
            finished.then(idle, None, controls, queue=False, **quiet)
            finished.then(inputs=[chat, chats], outputs=chats, js="page.save", **local)

        view = [chat, chats, sidebar]
        new.click(outputs=view, js="page.start", **local)
        chats.input(inputs=chats, outputs=view, js="page.open", **local)
        remove.click(inputs=chats, outputs=view, js="page.remove", **local)
        blocks.load(outputs=view, js="page.start", **local)
        blocks.load(page.header, None, header, queue=False, **quiet)
    return blocks


def mount(app: FastAPI, base_url: str, api_key: str | None) -> FastAPI:
    """Serve the page at `/` of app, whose own routes must exist already: they come first."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return gr.mount_gradio_app(
        app,
        build_page(base_url, api_key),
        path="/",
        theme=theme(),
        css_paths=HERE / "page.css",
        head=f"<script>{script}</script>",
        favicon_path=str(HERE / "icon.svg"),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
    )


def theme() -> gr.themes.Base:
    """Quiet colours, readable in light and dark; the fonts are the system's (page.css)."""
    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="zinc",
        radius_size="lg",
        font=gr.themes.Font("sans-serif"),  # gradio's default would load its own
        font_mono=gr.themes.Font("monospace"),
    ).set(
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )
