"""The page's API without a model: chats in memory, answers word by word, and what it was asked remembered."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from neo_desktop.ui.markdown import render_blocks

Json = dict[str, Any]


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": None}}, status)


@dataclass
class FakeServer:
    """Answers every question with `words`, unless `refusal` or `fails_after` says otherwise."""

    words: list[str] = field(default_factory=lambda: ["Hello ", "from ", "the ", "fake ", "server."])
    thoughts: list[str] = field(default_factory=list)
    pause_s: float = 0.01
    first_pause_s: float = 0.0
    finish_reason: str = "stop"
    refusal: tuple[int, str] | None = None  # of a question: HTTP status and message
    fails_after: int | None = None  # words, then an error
    health: Json = field(default_factory=lambda: {"status": "ok", "model": "fake-model"})
    examples: list[str] = field(default_factory=lambda: ["What is a KV cache?", "Who are you?"])
    chats: dict[str, Json] = field(default_factory=dict)
    nodes: dict[str, Json] = field(default_factory=dict)
    presets: dict[str, str] = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)
    deleted: dict[str, Json] = field(default_factory=dict)
    questions: list[Json] = field(default_factory=list)  # bodies of questions, oldest first
    listeners: dict[asyncio.Queue[str], str] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    notice: str | None = None  # trouble with the file of the chats
    trouble: str | None = None  # a GPU that cannot be used
    num_ids: int = 0

    def app(self) -> FastAPI:
        app = FastAPI(redirect_slashes=False)
        app.get("/health")(lambda: self.health)
        app.get("/v1/models")(lambda: {"data": [{"id": "fake-model", "max_model_len": 4096}]})
        for method, path, handler in [
            ("GET", "/events", self.events),
            ("GET", "/chats", self.list_chats),
            ("POST", "/chats", self.create_chat),
            ("GET", "/chats/{chat_id}", self.get_chat),
            ("PATCH", "/chats/{chat_id}", self.change_chat),
            ("DELETE", "/chats/{chat_id}", self.delete_chat),
            ("POST", "/chats/{chat_id}/restore", self.restore_chat),
            ("POST", "/chats/{chat_id}/messages", self.ask),
            ("GET", "/chats/{chat_id}/export", self.export),
            ("POST", "/messages/{node_id}/retry", self.retry),
            ("POST", "/messages/{node_id}/continue", self.go_on),
            ("POST", "/messages/{node_id}/stop", self.stop),
            ("POST", "/attachments", self.attach),
            ("POST", "/import", self.take_chats),
            ("GET", "/presets", self.list_presets),
            ("PUT", "/presets/{name}", self.save_preset),
            ("DELETE", "/presets/{name}", self.delete_preset),
            ("GET", "/examples", self.list_examples),
        ]:
            app.add_api_route(f"/api{path}", handler, methods=[method], response_model=None)
        return app

    # Events

    async def events(self, request: Request) -> Response:
        queue: asyncio.Queue[str] = asyncio.Queue()
        chat_id = request.query_params.get("chat", "")
        self.listeners[queue] = chat_id

        async def stream() -> AsyncIterator[str]:
            try:
                if chat_id in self.chats:
                    yield self._event("chat", self._whole(self.chats[chat_id]))
                yield self._event("chats", {"chats": self._list(), "notice": self.notice})
                if self.trouble is not None:
                    yield self._event("computer", {"trouble": self.trouble})
                while True:
                    yield await queue.get()
            finally:
                del self.listeners[queue]

        return StreamingResponse(stream(), media_type="text/event-stream")

    @staticmethod
    def _event(name: str, data: Json) -> str:
        return f"event: {name}\ndata: {json.dumps(data)}\n\n"

    def publish(self, name: str, data: Json, chat_id: str | None = None) -> None:
        for queue, chat in self.listeners.items():
            if chat_id is None or chat == chat_id:
                queue.put_nowait(self._event(name, data))

    # Chats

    def _id(self) -> str:
        self.num_ids += 1
        return f"id{self.num_ids}"

    def _entry(self, chat: Json) -> Json:
        nodes = [node for node in self.nodes.values() if node["chat_id"] == chat["id"]]
        is_streaming = any(node["state"] in ("waiting", "streaming") for node in nodes)
        keys = ("id", "title", "updated_s")
        return {**{key: chat[key] for key in keys}, "is_streaming": is_streaming}

    def _list(self) -> list[Json]:
        newest = sorted(self.chats.values(), key=lambda chat: -float(chat["updated_s"]))
        return [self._entry(chat) for chat in newest]

    def _whole(self, chat: Json) -> Json:
        nodes = [node for node in self.nodes.values() if node["chat_id"] == chat["id"]]
        used = sum(len(node["text"]) for node in nodes) // 4
        context = {"used_tokens": used, "max_tokens": 4096}
        return {**chat, **self._entry(chat), "nodes": nodes, "context": context}

    def _tell_chats(self) -> None:
        self.publish("chats", {"chats": self._list()})

    async def list_chats(self, query: str = "") -> Json:
        hits = []
        for entry in self._list():
            texts = [node["text"] for node in self.nodes.values() if node["chat_id"] == entry["id"]]
            found = [text for text in texts if query.lower() in text.lower()]
            if query.lower() in entry["title"].lower() or found:
                hits.append({**entry, "snippet": found[0][:80] if found else ""})
        return {"chats": hits}

    async def create_chat(self, body: Json) -> Json:
        chat = {"id": self._id(), "title": "", "updated_s": time.time(), "leaf_id": None}
        self.chats[chat["id"]] = {**chat, "settings": body.get("settings") or {}}
        return self._whole(self.chats[chat["id"]])

    async def get_chat(self, chat_id: str) -> Json | Response:
        if chat_id not in self.chats:
            return error(404, "there is no such chat")
        return self._whole(self.chats[chat_id])

    async def change_chat(self, chat_id: str, body: Json) -> Json:
        self.chats[chat_id].update(body)
        self.publish("chat", self.chats[chat_id], chat_id)
        self._tell_chats()
        return self._entry(self.chats[chat_id])

    async def delete_chat(self, chat_id: str) -> Response:
        self.deleted[chat_id] = self.chats.pop(chat_id)
        self._tell_chats()
        return Response(status_code=204)

    async def restore_chat(self, chat_id: str) -> Json:
        self.chats[chat_id] = self.deleted.pop(chat_id)
        self._tell_chats()
        return self._whole(self.chats[chat_id])

    async def export(self, chat_id: str) -> Response:
        name = {"Content-Disposition": 'attachment; filename="chat.json"'}
        return JSONResponse(self._whole(self.chats[chat_id]), headers=name)

    async def take_chats(self, request: Request) -> Json:
        body = await request.json()
        for chat in body["chats"]:
            self.chats[chat["id"]] = {"updated_s": time.time(), "leaf_id": None, "settings": {}, **chat}
        self._tell_chats()
        return {"chats": body["chats"]}

    # Messages

    def _node(self, chat_id: str, parent_id: str | None, role: str, text: str, state: str) -> Json:
        node = {
            "id": self._id(),
            "chat_id": chat_id,
            "parent_id": parent_id,
            "role": role,
            "created_s": time.time(),
            "state": state,
            "error": None,
            "thought": "",
            "thought_s": None,
            "thought_blocks": [],
            "figures": None,
            "attachments": [],
        }
        self.nodes[str(node["id"])] = node
        self._say(node, text)
        return node

    @staticmethod
    def _say(node: Json, text: str) -> None:
        node["text"], node["blocks"] = text, render_blocks(text)

    async def ask(self, chat_id: str, body: Json) -> Json | Response:
        self.questions.append(body)
        if self.refusal:
            return error(*self.refusal)
        chat = self.chats[chat_id]
        question = self._node(chat_id, body["parent_id"], "user", body["text"], "done")
        question["attachments"] = [self.files[each] for each in body.get("attachment_ids", [])]
        chat["title"] = chat["title"] or body["text"][:60]
        chat["updated_s"] = time.time()
        answer = self._answer(question)
        self.publish("node", question, chat_id)
        return {"question": question, "answer": answer}

    def _answer(self, question: Json) -> Json:
        answer = self._node(question["chat_id"], question["id"], "assistant", "", "waiting")
        self.chats[question["chat_id"]]["leaf_id"] = answer["id"]
        self._start(answer)
        return answer

    def _start(self, answer: Json) -> None:
        self.tasks[answer["id"]] = asyncio.create_task(self._stream(answer))

    async def _stream(self, node: Json) -> None:
        chat_id = node["chat_id"]
        self.publish("node", node, chat_id)
        self._tell_chats()
        await asyncio.sleep(self.first_pause_s)
        node["state"] = "streaming"
        for thought in self.thoughts:
            node["thought"] += thought
            node["thought_blocks"] = render_blocks(node["thought"])
            self.publish("delta", self._delta(node, 0), chat_id)
            await asyncio.sleep(self.pause_s)
        if self.thoughts:
            node["thought_s"] = 3.2
        for index, word in enumerate(self.words):
            if index == self.fails_after:
                self._end(node, "failed", error="out of memory")
                return
            first = max(len(node["blocks"]) - 1, 0)
            self._say(node, node["text"] + word)
            self.publish("delta", self._delta(node, first), chat_id)
            await asyncio.sleep(self.pause_s)
        self._end(node, "done")

    @staticmethod
    def _delta(node: Json, first: int) -> Json:
        return {
            "id": node["id"],
            "state": "streaming",
            "thought_s": node["thought_s"],
            "figures": None,
            "blocks_from": first,
            "blocks": node["blocks"][first:],
            "thought_blocks_from": 0,
            "thought_blocks": node["thought_blocks"],
        }

    def _end(self, node: Json, state: str, error: str | None = None) -> None:
        node["state"], node["error"] = state, error
        num_tokens = len(node["text"].split())
        has_text = state != "failed" and num_tokens > 0
        node["figures"] = {
            "first_token_s": 0.12 if has_text else None,
            "tokens_per_s": 31.2 if has_text else None,
            "output_tokens": num_tokens if has_text else 0,
            "finish_reason": self.finish_reason if state == "done" else None,
        }
        self.tasks.pop(node["id"], None)
        self.publish("node", node, node["chat_id"])
        chat = self.chats.get(node["chat_id"]) or self.deleted[node["chat_id"]]
        self.publish("context", self._whole(chat)["context"], node["chat_id"])
        self._tell_chats()

    async def retry(self, node_id: str) -> Json:
        return self._answer(self.nodes[self.nodes[node_id]["parent_id"]])

    async def go_on(self, node_id: str) -> Json:
        node = self.nodes[node_id]
        node["state"], node["figures"] = "waiting", None
        self._start(node)
        return node

    async def stop(self, node_id: str) -> Json:
        task = self.tasks.get(node_id)
        if task:
            task.cancel()
            self._end(self.nodes[node_id], "stopped")
        return self.nodes[node_id]

    # The rest

    async def attach(self, name: str, request: Request) -> Json | Response:
        content = await request.body()
        if name.endswith(".png"):
            return error(415, f"{name} is neither text nor PDF: attach one of these")
        kind = "pdf" if name.endswith(".pdf") else "text"
        file = {"id": self._id(), "name": name, "kind": kind, "num_chars": len(content)}
        self.files[file["id"]] = file
        return file

    async def list_presets(self) -> Json:
        return {"presets": [{"name": name, "text": text} for name, text in self.presets.items()]}

    async def save_preset(self, name: str, body: Json) -> Json:
        self.presets[name] = body["text"]
        return {"name": name, **body}

    async def delete_preset(self, name: str) -> Response:
        del self.presets[name]
        return Response(status_code=204)

    async def list_examples(self) -> Json:
        return {"examples": self.examples}
