"""What a page does: asks under /api, and listens to its events."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

Json = dict[str, Any]


class ChatClient:
    """The page's calls; errors of the server are raised as httpx.HTTPStatusError."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api", timeout=60, trust_env=False)

    def call(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def get(self, path: str, **params: str) -> Any:
        return self.call("GET", path, params=params)

    def post(self, path: str, body: Any = None) -> Any:
        return self.call("POST", path, json=body)

    def patch(self, chat_id: str, **body: Any) -> Any:
        return self.call("PATCH", f"/chats/{chat_id}", json=body)

    def new_chat(self, **settings: Any) -> str:
        return str(self.post("/chats", {"settings": settings})["id"])

    def chat(self, chat_id: str) -> Json:
        return dict(self.get(f"/chats/{chat_id}"))

    def node(self, chat_id: str, node_id: str) -> Json:
        return dict(next(node for node in self.chat(chat_id)["nodes"] if node["id"] == node_id))

    def ask(self, chat_id: str, text: str, parent_id: str | None = None, **body: Any) -> tuple[Json, Json]:
        body = {"text": text, "parent_id": parent_id, **body}
        both = self.post(f"/chats/{chat_id}/messages", body)
        return both["question"], both["answer"]

    def ended(self, node: Json) -> Json:
        """Wait until nothing more is written to an answer; return it."""
        return self.until(node, lambda one: one["state"] not in ("waiting", "streaming"))

    def until(self, node: Json, holds: Callable[[Json], bool]) -> Json:
        """Wait until something holds for a message; return it."""
        waiting = threading.Event()
        for _ in range(3000):
            now = self.node(node["chat_id"], node["id"])
            if holds(now):
                return now
            waiting.wait(0.01)
        raise AssertionError(f"it did not happen: {now}")

    def answered(self, chat_id: str, text: str, parent_id: str | None = None, **body: Any) -> Json:
        return self.ended(self.ask(chat_id, text, parent_id, **body)[1])

    def titles(self, query: str = "") -> list[str]:
        return [chat["title"] for chat in self.get("/chats", query=query)["chats"]]

    @contextlib.contextmanager
    def events(self, **params: str) -> Iterator["Page"]:
        with self.http.stream("GET", "/events", params=params) as stream:
            stream.raise_for_status()
            yield Page(_events(stream))


class Page:
    """What a page shows, made of its events alone."""

    def __init__(self, events: Iterator[tuple[str, Any]]) -> None:
        self._events = events
        self.chats: list[Json] = []
        self.notice: str | None = None
        self.chat: Json = {}
        self.nodes: dict[str, Json] = {}
        self.names: list[str] = []

    def read_until(self, holds: Callable[["Page"], bool]) -> None:
        if holds(self):
            return
        for name, data in self._events:
            self.names.append(name)
            self._take(name, data)
            if holds(self):
                return
        raise AssertionError("the events have ended")

    def _take(self, name: str, data: Any) -> None:
        if name == "chats":
            self.chats, self.notice = data["chats"], data["notice"]
        elif name == "chat":
            self.chat |= data
            if "nodes" in data:
                self.nodes = {node["id"]: node for node in data["nodes"]}
        elif name == "context":
            self.chat["context"] = data
        elif name == "node":
            self.nodes[data["id"]] = data
        elif name == "delta":
            node = self.nodes[data["id"]]
            node |= {key: data[key] for key in ("state", "thought_s", "figures")}
            for blocks in ("blocks", "thought_blocks"):
                start = data[f"{blocks}_from"]
                assert start <= len(node[blocks]), "blocks are missing"
                node[blocks] = node[blocks][:start] + data[blocks]


def _events(stream: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in stream.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
