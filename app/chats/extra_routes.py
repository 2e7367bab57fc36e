"""The routes beside those of the chats themselves, under /api: files in and out, presets, examples."""

import asyncio
import re
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from neo_desktop.app.chats import transfer
from neo_desktop.app.chats.attachments import MAX_PDF_READERS, read_file
from neo_desktop.app.chats.bodies import MAX_TITLE_CHARS, PresetBody
from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.chats.views import attachment_view, entry_view
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web import errors
from neo_desktop.app.web.body import parse
from neo_desktop.app.web.errors import ApiError
from neo_desktop.engine.loading import BUILTIN_NAME
from neo_desktop.engine.options import BUILTIN

BUILTIN_EXAMPLES = (
    "What can neo-desktop do?",
    "How do I load a bigger model?",
    "How do I use you from Python?",
    "What is a KV cache?",
)
EXAMPLES = (
    "Explain how a refrigerator works, step by step.",
    "Write a Python function that finds the longest word in a text, with tests.",
    "Compare three ways to learn a language in a table.",
    "Help me write a friendly message that declines an invitation.",
)


def routes(host: ModelHost, chats: Chats) -> APIRouter:
    """Export and import, attachments, presets and examples."""
    router = APIRouter()
    store, work, news = chats.store, chats.worker, chats.news
    readers = asyncio.Semaphore(MAX_PDF_READERS)

    @router.get("/chats/{chat_id}/export")
    async def export_chat(chat_id: str, format: str = "json") -> Response:  # noqa: A002 - its name in the query
        chat = await work(store.chat, chat_id)
        if format == "markdown":
            text = await asyncio.to_thread(transfer.to_markdown, chat)
            return _download(text, "text/markdown", chat.entry.title or "chat", "md")
        if format != "json":
            raise ApiError(400, "format must be json or markdown", param="format")
        text = await asyncio.to_thread(transfer.to_json, [chat])
        return _download(text, "application/json", chat.entry.title or "chat", "json")

    @router.get("/export")
    async def export_all() -> Response:
        entries = await work(store.entries)
        everything = [await work(store.chat, entry.id) for entry in entries]
        text = await asyncio.to_thread(transfer.to_json, everything)
        return _download(text, "application/json", "neo-desktop chats", "json")

    @router.post("/import")
    async def import_chats(request: Request) -> JSONResponse:
        try:
            new = await asyncio.to_thread(transfer.from_json, await request.body())
        except ValidationError as error:
            raise errors.from_validation(error) from None
        ids = set(await work(store.add_chats, new))
        news.list_changed()
        return JSONResponse(
            {"chats": [entry_view(one) for one in await work(store.entries) if one.id in ids]}
        )

    @router.post("/attachments")
    async def attach(request: Request, name: str = "file") -> JSONResponse:
        name, kind, text = await read_file(name, await request.body(), readers)
        return JSONResponse(attachment_view(await work(store.attach, name, kind, text)))

    @router.get("/presets")
    async def presets() -> JSONResponse:
        return JSONResponse(
            {"presets": [{"name": name, "text": text} for name, text in await work(store.presets)]}
        )

    @router.put("/presets/{name:path}")
    async def set_preset(name: str, request: Request) -> JSONResponse:
        body = await parse(request, PresetBody)
        if not name.strip() or len(name) > MAX_TITLE_CHARS:
            raise ApiError(400, f"the name must have 1 to {MAX_TITLE_CHARS} characters", param="name")
        await work(store.set_preset, name, body.text)
        return JSONResponse({"name": name, "text": body.text})

    @router.delete("/presets/{name:path}", status_code=204)
    async def remove_preset(name: str) -> None:
        await work(store.remove_preset, name)

    @router.get("/examples")
    async def examples() -> JSONResponse:
        is_builtin = host.name in (BUILTIN, BUILTIN_NAME)  # also while it is being loaded
        return JSONResponse({"examples": BUILTIN_EXAMPLES if is_builtin else EXAMPLES})

    return router


def _download(text: str, media_type: str, title: str, extension: str) -> Response:
    name = re.sub(r"[^\w .,()-]+", "_", title)[:80].strip(" .") or "chat"
    header = f"attachment; filename*=UTF-8''{quote(f'{name}.{extension}')}"
    return Response(text, media_type=media_type, headers={"Content-Disposition": header})
