"""The routes under /v1."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError

from neo_desktop.app import errors
from neo_desktop.app.chat_template import ChatTemplate, ChatTemplateError
from neo_desktop.app.connection import ClientConnection, EventStream
from neo_desktop.app.errors import ApiError
from neo_desktop.app.replies import ChatShape, CompletionShape, Shape, events, whole_answer
from neo_desktop.app.schemas import ChatCompletionRequest, CompletionRequest
from neo_desktop.app.service import EngineService, Generation, Prompt
from neo_desktop.engine.engine import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams

MAX_BODY_BYTES = 32 * 2**20

Body = TypeVar("Body", bound=BaseModel)
AnyRequest = ChatCompletionRequest | CompletionRequest


def create_api(service: EngineService) -> FastAPI:
    """Return the app to mount at /v1: OpenAI's API on this service's model."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.add_middleware(ClientConnection, max_body_bytes=MAX_BODY_BYTES)
    template = ChatTemplate(service.tokenizer.chat_template, service.tokenizer.special_tokens)
    model = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "neo-desktop",
        "max_model_len": service.max_context_tokens,
    }

    @app.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return model

    @app.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _parse(request, ChatCompletionRequest)
        _check_model(service, body.model)
        params = _sampling_params(service, body)
        messages = [message.for_template() for message in body.messages]
        try:
            # In a thread: templates are programs, and not ours.
            prompt = await asyncio.to_thread(template.render, messages, body.chat_template_kwargs)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        # The template has written the special tokens out.
        generation = await _submit(service, [prompt], params, "messages", add_special_tokens=False)
        return await _answer(generation, ChatShape(service.tokenizer, bool(body.logprobs)), service, body)

    @app.post("/completions")
    async def completions(request: Request) -> Response:
        body = await _parse(request, CompletionRequest)
        _check_model(service, body.model)
        params = _sampling_params(service, body)
        generation = await _submit(service, body.prompt, params, "prompt", add_special_tokens=True)
        shape = CompletionShape(service.tokenizer, body.logprobs is not None)
        return await _answer(generation, shape, service, body)

    return app


async def _parse(request: Request, schema: type[Body]) -> Body:
    try:
        # In a thread: a body may be long.
        return await asyncio.to_thread(schema.model_validate_json, await request.body())
    except ValidationError as error:
        raise errors.from_validation(error) from None


def _check_model(service: EngineService, name: str | None) -> None:
    """There is one model; a request may name it or leave the name out."""
    if name not in (None, service.model_name):
        raise ApiError(
            404,
            f"the model {name!r} is not served here, but {service.model_name!r} is",
            param="model",
            code="model_not_found",
        )


def _sampling_params(service: EngineService, body: AnyRequest) -> SamplingParams:
    try:
        return body.sampling_params(service.sampling_defaults)
    except ValueError as error:
        field = str(error).split()[0]
        raise ApiError(400, str(error), param=field) from error


async def _submit(
    service: EngineService,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    field: str,
    *,
    add_special_tokens: bool,
) -> Generation:
    try:
        return await service.submit(prompts, params, add_special_tokens=add_special_tokens)
    except ContextLengthError as error:
        raise ApiError(400, str(error), param=field, code="context_length_exceeded") from error
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from error


async def _answer(generation: Generation, shape: Shape, service: EngineService, body: AnyRequest) -> Response:
    if not body.stream:
        return JSONResponse(await whole_answer(generation, shape, service.model_name))
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    parts = events(generation, shape, service.model_name, include_usage=include_usage)
    return EventStream(parts, generation)
