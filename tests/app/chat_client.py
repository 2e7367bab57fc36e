"""Calls to a server's chats from another thread or process, over a route for tests."""

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.messages import (
    Chat,
    NotFoundError,
    NotPossibleError,
    Settings,
    branch,
    used_tokens,
)
from neo_desktop.app.errors import ApiError
from neo_desktop.engine.errors import SettingError

Json = dict[str, Any]
REFUSALS = (ApiError, NotFoundError, NotPossibleError, SettingError, StoreError, ValidationError)


class RefusedError(Exception):
    """A refused call; `kind` is the name of the error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def install(app: FastAPI) -> None:
    """Add the route, which returns the result, or the error's class and text."""
    chats = app.state.page.chats

    def whole(chat: Chat) -> Json:
        nodes = [asdict(message) for message in chat.messages]
        way = branch({message.id: message for message in chat.messages}, chat.leaf_id)
        return {
            **asdict(chat.entry),
            "settings": asdict(chat.settings),
            "leaf_id": chat.leaf_id,
            "nodes": nodes,
            "used_tokens": used_tokens(way),
        }

    async def one(name: str, *args: Any, **named: Any) -> Any:  # noqa: PLR0911, PLR0912
        match name:
            case "new_chat":
                return (await chats.create(_settings(named))).entry.id
            case "set":
                return await chats.change(args[0], settings=_settings(named))
            case "rename":
                return await chats.change(args[0], title=args[1])
            case "show":
                return await chats.change(args[0], leaf_id=args[1])
            case "chat":
                return whole(await chats.chat(*args))
            case "entries":
                return [asdict(entry) for entry in await chats.entries(*args)]
            case "ask":
                return [asdict(message) for message in await chats.answers.ask(*args, **named)]
            case "retry" | "resume" | "stop":
                return asdict(await getattr(chats.answers, name)(*args))
            case "decide":
                return chats.answers.calls.decide(*args)
            case "attach":
                return asdict(await chats.attach(args[0], args[1].encode("latin-1")))
            case "add":
                return await chats.add(args[0].encode("latin-1"))
            case "notice":
                return chats.answers.notice
            case _:
                return await getattr(chats, name)(*args, **named)

    @app.post("/test")
    async def call(request: Request) -> JSONResponse:
        name, args, named = await request.json()
        try:
            return JSONResponse({"result": await one(name, *args, **named)})
        except REFUSALS as error:
            return JSONResponse({"kind": type(error).__name__, "message": str(error)})


def _settings(named: Json) -> Settings:
    return Settings(**named | {"servers": tuple(named.get("servers", ()))})


class ChatClient:
    """Calls over the route."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of the chats; raise RefusedError if the server refuses."""
        answer = self._http.post("/test", json=[name, args, named]).raise_for_status().json()
        if "kind" in answer:
            raise RefusedError(answer["kind"], answer["message"])
        return answer["result"]

    def new_chat(self, **settings: Any) -> str:
        return str(self.call("new_chat", **settings))

    def chat(self, chat_id: str) -> Json:
        return dict(self.call("chat", chat_id))

    def entries(self, query: str = "") -> list[Json]:
        return list(self.call("entries", query))

    def titles(self, query: str = "") -> list[str]:
        return [entry["title"] for entry in self.entries(query)]

    def node(self, chat_id: str, node_id: str) -> Json:
        return dict(next(node for node in self.chat(chat_id)["nodes"] if node["id"] == node_id))

    def ask(self, chat_id: str, text: str, parent_id: str | None = None, **body: Any) -> tuple[Json, Json]:
        question, answer = self.call("ask", chat_id, parent_id, text, **body)
        return question, answer

    def ended(self, node: Json) -> Json:
        """Wait until an answer is complete or cut; return it."""
        return self.until(node, lambda one: one["state"] not in ("waiting", "streaming"))

    def until(self, node: Json, holds: Callable[[Json], bool]) -> Json:
        """Wait until a message meets the condition; return it."""
        waiting = threading.Event()
        for _ in range(3000):
            now = self.node(node["chat_id"], node["id"])
            if holds(now):
                return now
            waiting.wait(0.01)
        raise AssertionError(f"it did not happen: {now}")

    def answered(self, chat_id: str, text: str, parent_id: str | None = None, **body: Any) -> Json:
        return self.ended(self.ask(chat_id, text, parent_id, **body)[1])


def chats_file(*messages: dict[str, Any], leaf_id: str | None = None, **parts: Any) -> dict[str, Any]:
    """Return a file of one chat."""
    entry = {"id": "c", "title": "t", "created_s": 1.0, "updated_s": 1.0, **parts.pop("entry", {})}
    chat = {"entry": entry, "settings": {}, "leaf_id": leaf_id, "messages": messages, **parts}
    return {"format": "neo-desktop chats", "version": 1, "chats": [chat]}


def message(role: str, parent_id: str | None = None, **fields: Any) -> dict[str, Any]:
    same = {"id": "a", "chat_id": "c", "created_s": 1.0, "text": "x"}
    return same | {"role": role, "parent_id": parent_id, **fields}
