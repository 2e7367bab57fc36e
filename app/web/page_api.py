"""The routes under /api: what the page needs beside OpenAI's API. They are the page's own and may change."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI

from neo_desktop.app.chats import extra_routes
from neo_desktop.app.chats import routes as chat_routes
from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.live import feed
from neo_desktop.app.live.feed import EngineFeed
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web import errors, events
from neo_desktop.app.web.events import Hub

BODY_LIMITS = {"/api/import": 256 * 2**20}  # bytes: years of chats


def create_page_api(
    host: ModelHost,
    hub: Hub,
    chats: Chats,
    engine: EngineFeed,
    parts: Sequence[APIRouter] = (),
    trouble: str | None = None,
) -> FastAPI:
    """Return the app to mount at /api, with the routes of further parts of the page.

    Args:
        trouble: what keeps this computer's GPU from being used, for everybody who connects.
    """

    async def computer() -> dict[str, Any]:
        return {"trouble": trouble}

    if trouble is not None:
        hub.greet("computer", computer)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    chat_routes.install_errors(app)
    app.include_router(chat_routes.routes(chats))
    app.include_router(extra_routes.routes(host, chats))
    app.include_router(feed.routes(engine))
    for part in parts:
        app.include_router(part)
    app.include_router(events.routes(hub, chats.news.whole_chat))
    return app
