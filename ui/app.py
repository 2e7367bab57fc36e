"""The page: its components, which handler hears which event, and how it is mounted on the server's port."""

import html
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from neo_desktop.ui.handlers import SETTINGS, Handlers, idle
from neo_desktop.ui.messages import stopped

HERE = Path(__file__).parent

# Whatever a model writes (an image's address, say), the page asks nobody but its own server.
CONTENT_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'none'"

LATEX_DELIMITERS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]


def mount(app: FastAPI, base_url: str, api_key: str | None) -> FastAPI:
    """Serve the page at `/` of app, whose own routes must exist already: they come first."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
    script = f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>"
    gr.mount_gradio_app(
        app,
        build_page(base_url, api_key),
        path="/",
        theme=_theme(),
        css_paths=HERE / "page.css",
        head=policy + script,
        favicon_path=str(HERE / "icon.svg"),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
    )
    return app


def build_page(base_url: str, api_key: str | None, title: str = "neo-desktop") -> gr.Blocks:
    """The page for the OpenAI-compatible server at base_url (which ends in `/v1`), without its style."""
    blocks = gr.Blocks(title=title, fill_height=True, fill_width=True)
    with blocks:
        with gr.Sidebar(width=300) as sidebar:
            gr.HTML(f'<h1><img src="favicon.ico" alt="">{html.escape(title)}</h1>', elem_id="title")
            new = gr.Button("New chat", variant="primary")
            chats = gr.Radio([], label="Chats", elem_id="chats", interactive=True)
            remove = gr.Button("Delete this chat", size="sm", elem_id="remove")
            with gr.Accordion("Settings", open=False):
                system_prompt = gr.Textbox(
                    "", label="System prompt", placeholder="none", lines=3, max_lines=12
                )
                # Not gr.Number: it turns an empty field into 0.
                settings = [
                    gr.Textbox("", label=label, info=info, placeholder="model's default")
                    for _, label, info, _ in SETTINGS
                ]
        header = gr.HTML(elem_id="model")
        chat = gr.Chatbot(
            label="Conversation",
            show_label=False,
            placeholder="<h2>What would you like to know?</h2>",
            elem_id="chat",
            scale=1,
            buttons=["copy"],
            editable="user",
            group_consecutive_messages=False,  # a thought stays apart, so that copying copies the answer
            latex_delimiters=LATEX_DELIMITERS,
            reasoning_tags=[("<think>", "</think>")],
        )
        box = gr.Textbox(
            "",
            label="Message",
            show_label=False,
            placeholder="Message",
            elem_id="box",
            max_lines=12,
            submit_btn="Send",
            autofocus=True,
        )

        handlers = Handlers(base_url, api_key)
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        controls = [box, new, chats, remove]
        context = [chat, system_prompt, *settings]
        asking: dict[str, Any] = {"outputs": [*controls, chat], "concurrency_limit": None, **quiet}
        answers: list[Any] = [
            box.submit(handlers.send, [box, *context], **asking),
            chat.edit(handlers.edit, context, **asking),
            chat.retry(handlers.retry, context, **asking),
        ]
        stop = box.stop(stopped, chat, chat, cancels=answers, queue=False, **quiet)
        # Again, since a last piece of the answer may arrive after that and take its place.
        stop = stop.then(stopped, chat, chat, queue=False, **quiet)
        for ended in [*answers, stop]:
            ended.then(idle, None, controls, queue=False, **quiet)
            ended.failure(idle, None, controls, queue=False, **quiet)
            ended.then(None, [chat, chats], chats, js="page.save", **quiet)

        view = [chat, chats, sidebar]
        new.click(None, None, view, js="page.start", **quiet)
        chats.input(None, chats, view, js="page.open", **quiet)
        remove.click(None, chats, view, js="page.remove", **quiet)
        blocks.load(None, None, view, js="page.start", **quiet)
        blocks.load(handlers.header, None, header, queue=False, **quiet)
    return blocks


def _theme() -> gr.themes.Base:
    # Quiet colours, readable in light and dark; the fonts are the system's (page.css).
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
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
    )
