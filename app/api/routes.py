"""The routes under /v1."""

import re
import shlex
import time
from collections.abc import Collection
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from neo_desktop.app.api import chat, completions, embeddings, messages, responses
from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.response_store import ResponseStore
from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web import errors
from neo_desktop.app.web.body import parse
from neo_desktop.app.web.errors import ApiError
from neo_desktop.app.web.limits import DEFAULT_LIMITS
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults

ANTHROPICS = "claude-*"  # names that Anthropic's programs ask for by themselves


class ModelNames:
    """The names under which requests may ask for the model that is loaded.

    Args:
        aliases: beside its own; `*` in one stands for any text.
    """

    def __init__(self, aliases: Collection[str]) -> None:
        self._aliases = tuple(dict.fromkeys(aliases))
        patterns = (re.escape(alias).replace(r"\*", ".*") for alias in self._aliases)
        self._pattern = re.compile("|".join(patterns), re.DOTALL) if self._aliases else None

    def of(self, service: EngineService) -> list[str]:
        """The model's own name, and those aliases that are names."""
        return list(dict.fromkeys([service.model_name, *(one for one in self._aliases if "*" not in one)]))

    def check(self, service: EngineService, name: str | None) -> None:
        """There is one model; a request may name it or leave the name out.

        Raises:
            ApiError: it names another one.
        """
        if name in (None, service.model_name) or (self._pattern and self._pattern.fullmatch(name or "")):
            return
        shown = (name or "")[:100]
        message = (
            f"the model {shown!r} is not served here, but {service.model_name!r} is: ask for that one, or "
            f"start the server with --model-alias {shlex.quote(shown)}"
        )
        raise ApiError(404, message, param="model", code="model_not_found")


class _Samples(Protocol):
    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams: ...


def create_api(
    host: ModelHost,
    *,
    max_messages: int = DEFAULT_LIMITS.max_messages,
    model_aliases: Collection[str] = (),
) -> FastAPI:
    """Return the app to mount at /v1: OpenAI's and Anthropic's API on the model that is loaded.

    Args:
        max_messages: of a chat.
        model_aliases: further names of that model; `*` in one stands for any text.
    """
    names = ModelNames(model_aliases)
    anthropics_names = ModelNames([*model_aliases, ANTHROPICS])
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    created = int(time.time())
    store = ResponseStore()

    @app.get("/models")
    async def models() -> dict[str, Any]:
        served = [host.service] if host.has_service else []
        cards = [_model(service, name, created) for service in served for name in names.of(service)]
        return {"object": "list", "data": cards}

    @app.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service = host.service
        names.check(service, name)
        return _model(service, name, created)

    @app.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, service = await parse(request, chat.ChatCompletionRequest), host.service
        names.check(service, body.model)
        _check_messages(body.messages, max_messages)
        return await chat.answer(service, body, _sampling_params(service, body))

    @app.post("/completions")
    async def raw_completions(request: Request) -> Response:
        body, service = await parse(request, completions.CompletionRequest), host.service
        names.check(service, body.model)
        return await completions.answer(service, body, _sampling_params(service, body))

    @app.post("/messages")
    async def anthropic_messages(request: Request) -> Response:
        body, service = await parse(request, messages.MessagesRequest), host.service
        anthropics_names.check(service, body.model)
        _check_messages(body.messages, max_messages)
        return await messages.answer(service, body, _sampling_params(service, body))

    @app.post("/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body, service = await parse(request, messages.CountTokensRequest), host.service
        anthropics_names.check(service, body.model)
        _check_messages(body.messages, max_messages)
        return await messages.count_tokens(service, body)

    @app.post("/responses")
    async def create_response(request: Request) -> Response:
        body, service = await parse(request, responses.ResponsesRequest), host.service
        names.check(service, body.model)
        _check_messages(body.input, max_messages, "input")
        return await responses.answer(service, store, body, _sampling_params(service, body))

    @app.post("/responses/{name}")
    async def no_response_action(name: str) -> Response:
        raise ApiError(404, f"there is no /v1/responses/{name} to post to")

    @app.get("/responses/{response_id}")
    async def stored_response(response_id: str) -> Response:
        return JSONResponse(store.get(response_id).body)

    @app.delete("/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        return JSONResponse(responses.input_items(store.get(response_id)))

    @app.post("/embeddings")
    async def create_embeddings(request: Request) -> Response:
        body, service = await parse(request, embeddings.EmbeddingRequest), host.service
        names.check(service, body.model)
        return await embeddings.answer(service, body)

    return app


def _model(service: EngineService, name: str, created: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "neo-desktop",
        "root": service.model_name,
        "max_model_len": service.max_context_tokens,
    }


def _check_messages(messages: list[Any], max_messages: int, field: str = "messages") -> None:
    if len(messages) > max_messages:
        message = f"{field} holds {len(messages)} messages, more than the {max_messages} that it may hold"
        raise ApiError(400, message, param=field)


def _sampling_params(service: EngineService, body: _Samples) -> SamplingParams:
    try:
        return body.sampling_params(service.sampling_defaults)
    except SettingError as error:
        raise ApiError(400, str(error), param=error.field) from error
