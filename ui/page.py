"""The page: a Gradio app with the views of a server, mounted beside its API."""

import asyncio
import os
import shutil
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

# Before the import: nothing may call out, and no statistics are computed after each event.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)

import gradio as gr
from fastapi import FastAPI
from gradio.components import Navbar
from gradio.events import api
from starlette.routing import Mount

from neo_desktop.app.application import PageServices
from neo_desktop.app.chats.messages import Settings
from neo_desktop.app.news import CHATS, MODELS, TOOLS, chat_topic, text_topic
from neo_desktop.ui.chat import ChatView, Look
from neo_desktop.ui.engine import engine_view
from neo_desktop.ui.following import is_read, while_seen
from neo_desktop.ui.guard import PageGuard
from neo_desktop.ui.models import models_view
from neo_desktop.ui.refusals import telling
from neo_desktop.ui.selftest import selftest_view
from neo_desktop.ui.settings import SettingsView
from neo_desktop.ui.sidebar import Sidebar

# System fonts, one accent colour, nothing from elsewhere.
THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    radius_size=gr.themes.sizes.radius_md,
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)
# Gradio's queue looks for work each millisecond, and for progress each 10 ms: 6 % of a core.
QUEUE_SLEEP_S = 0.03
UNUSED_SLEEP_S = 0.25  # while no page is open
PROGRESS_SLEEP_S = 1.0  # the page reports none
MAX_EVENTS = 400  # under way at a time: each open page has two
MAX_STATES = 10_000  # pages whose `Look` is kept
OTHERS_S = 1.0  # how often changes of another process are looked for
MAX_FILE = "20mb"
READ_ADDRESS = "(look) => [look, location.search]"


def mount(app: FastAPI) -> FastAPI:
    """Serve the page of `app.state.page` at `/`."""
    services: PageServices = app.state.page
    uploads = services.data_folder / "uploads"
    shutil.rmtree(uploads, ignore_errors=True)  # of an earlier run
    uploads.mkdir(mode=0o700, parents=True)
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    demo = build(services)
    # By default each start tells all that wait their tiers: n waiting events would hold n * n messages.
    demo.state_session_capacity = MAX_STATES
    demo.queue(default_concurrency_limit=None, max_size=4 * MAX_EVENTS, status_update_rate=3600.0)
    demo._queue.sleep_when_free = UNUSED_SLEEP_S
    demo._queue.progress_update_sleep_when_free = PROGRESS_SLEEP_S
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode")  # it is off, and Gradio warns all the same
        gr.mount_gradio_app(
            app,
            demo,
            "/",
            theme=THEME,
            css_paths=[Path(__file__).parent / "page.css"],
            favicon_path=str(Path(__file__).parent / "icon.svg"),
            footer_links=[],
            run_history=False,
            show_error=False,
            max_file_size=MAX_FILE,
            ssr_mode=False,
            enable_monitoring=False,
            pwa=True,
            mcp_server=False,
        )
    # The heartbeat would be a page's second stream, but a browser keeps only six connections to a server.
    # Without it, Gradio deletes states by their number.
    demo.config["connect_heartbeat"] = False
    mounted = app.routes[-1]
    assert isinstance(mounted, Mount)

    def pace(is_used: bool) -> None:
        demo._queue.sleep_when_free = QUEUE_SLEEP_S if is_used else UNUSED_SLEEP_S

    mounted.app = PageGuard(mounted.app, uploads, pace)
    return app


def build(services: PageServices) -> gr.Blocks:
    """Return the views, one per address."""
    demo: gr.Blocks
    with gr.Blocks(
        title="neo-desktop", analytics_enabled=False, fill_height=True, delete_cache=(3600, 86_400)
    ) as demo:
        chat_page(services)
    demo.max_threads = MAX_EVENTS
    for name, view in (("Engine", engine_view), ("Models", models_view), ("Self-test", selftest_view)):
        with demo.route(name, f"/{name.lower()}"):
            Navbar(main_page_name="Chat")
            view(services)
    return demo


def chat_page(services: PageServices) -> None:
    """Build the first view: list, chat, settings."""
    Navbar(main_page_name="Chat")
    with gr.Sidebar(width=280, elem_id="sidebar"):
        left = gr.Column()
    with gr.Column(elem_id="chat"):
        chat = ChatView(services)
    with left:
        sidebar = Sidebar(chat)
    with gr.Sidebar(position="right", open=False, width=300, elem_id="settings"):
        settings = SettingsView(chat)
    for part in (chat, sidebar, settings):
        part.connect()
    add_api(services)

    async def follow(look: Look, address: str, request: gr.Request) -> AsyncIterator[dict[Any, Any]]:
        """Show the chat that the address names, and all around it as it changes, while the page is seen."""
        look.chat_id = look.chat_id or parse_qs(address.removeprefix("?")).get("chat", [None])[0]
        shown: dict[Any, Any] = {}
        version = await services.chats.version()
        with services.news.follow(CHATS, MODELS, TOOLS, look.topic) as changed:
            while await is_read(request):
                changed.clear()
                present = await chat.present(look)
                is_live = chat.is_live(present)
                now = {
                    sidebar.list: await sidebar.entries(look),
                    sidebar.title: "" if present is None else present.entry.title,
                    chat.header: chat.model_line(look),
                    chat.foot: chat.figures(present),
                    chat.box: gr.update(stop_btn=is_live, submit_btn=not is_live),
                    chat.tick: chat.tick_of(look, present),
                    **settings.shown(present),
                }
                if new := {part: value for part, value in now.items() if shown.get(part, shown) != value}:
                    yield new
                shown = now
                while not changed.is_set():
                    try:
                        await asyncio.wait_for(changed.wait(), OTHERS_S)
                    except TimeoutError:
                        if (found := await services.chats.version()) != version:
                            version = found
                            break
                await asyncio.sleep(0.05)

    outputs = [sidebar.list, sidebar.title, chat.header, chat.foot, chat.box, chat.tick, *settings.components]
    while_seen(chat.header, follow, outputs, inputs=[chat.look, chat.address], js=READ_ADDRESS)


def add_api(services: PageServices) -> None:
    """Offer the functions `chat` and `models` to `gradio_client`."""
    chats = services.chats

    async def chat(message: str, chat_id: str = "") -> AsyncIterator[dict[str, str]]:
        """Ask in a chat, "" for a new one; yields {"chat_id", "text", "thought", "state"} as it grows."""
        with telling():
            present = await (chats.chat(chat_id) if chat_id else chats.create(Settings()))
            _, answer = await chats.answers.ask(present.entry.id, present.leaf_id, message)
            with services.news.follow(text_topic(answer.chat_id), chat_topic(answer.chat_id)) as grown:
                while True:
                    grown.clear()
                    now = chats.answers.present(answer)
                    if now is answer and not grown.is_set():
                        whole = await chats.chat(answer.chat_id)
                        now = next(one for one in whole.messages if one.id == answer.id)
                    yield {name: getattr(now, name) for name in ("chat_id", "text", "thought", "state")}
                    if not now.is_live:
                        return
                    await grown.wait()

    async def models() -> list[dict[str, object]]:
        """Return the models on this computer; `name` is what `chat` loads with."""
        await services.shelf.look()
        return [
            {"name": one.model.name, "runnable": one.refusal is None, "reason": one.refusal}
            for one in services.shelf.models
        ]

    api(chat, api_name="chat")
    api(models, api_name="models")
