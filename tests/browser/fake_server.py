"""A small OpenAI-compatible server that answers slowly, word by word, and remembers what it was asked."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class FakeServer:
    """Answers every question with `words`, unless `refusal` or `breaks_after` says otherwise."""

    words: list[str] = field(default_factory=lambda: ["Hello ", "from ", "the ", "fake ", "server."])
    pause_s: float = 0.01
    first_pause_s: float = 0.0
    finish_reason: str = "stop"
    refusal: tuple[int, str] | None = None  # HTTP status and message
    breaks_after: int | None = None  # words, then an error in the stream
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the requests, oldest first
    authorization: str = ""  # of the last request
    disconnected: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        vars(self).update(vars(FakeServer()))

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(lambda: {"status": "ok"})
        app.get("/v1/models")(self.models)
        app.post("/v1/chat/completions")(self.chat_completions)
        return app

    def models(self) -> dict[str, Any]:
        model = {"id": "fake-model", "object": "model", "created": 0, "owned_by": "tests"}
        return {"object": "list", "data": [model | {"max_model_len": 4096}]}

    async def chat_completions(self, request: Request) -> Response:
        self.authorization = request.headers.get("authorization", "")
        self.bodies.append(await request.json())
        if self.refusal:
            status, message = self.refusal
            return JSONResponse(error(message), status_code=status)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        try:
            yield event(chunk({"role": "assistant", "content": ""}))
            await asyncio.sleep(self.first_pause_s)
            for sent, word in enumerate(self.words):
                if sent == self.breaks_after:
                    yield event(error("out of memory"))
                    return
                yield event(chunk({"content": word}))
                await asyncio.sleep(self.pause_s)
            yield event(chunk({}, self.finish_reason))
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.words), "total_tokens": 0}
            yield event(chunk() | {"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def chunk(delta: dict[str, str] | None = None, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "fake-model",
        "choices": [choice],
    }
