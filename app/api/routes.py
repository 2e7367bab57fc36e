"""The routes under /v1."""

import asyncio
import codecs
import shlex
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Annotated, Any, cast, get_type_hints

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from neo_desktop.app.api import chat, completions, embeddings, messages, responses
from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.responses import MAX_RESPONSES, ResponseStore
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web import errors
from neo_desktop.engine.errors import SettingError

_OTHER_FORMS = ("multipart/", "application/x-www-form-urlencoded", "application/xml", "text/xml")
SHORT_BYTES = 16_384  # validated in less time than the way to a thread and back takes
ANTHROPICS = "claude-*"  # names that Anthropic's programs ask for by themselves


def check_name(service: EngineService, name: str | None, aliases: Collection[str]) -> EngineService:
    """Return the service if its model has this name; None names any model, `*` in an alias any text."""
    is_alias = name is not None and any(fnmatchcase(name, alias) for alias in aliases)
    if name is None or name == service.model_name or is_alias:
        return service
    shown = name[:100]
    message = (
        f"the model {shown!r} is not served here, but {service.model_name!r} is: ask for that one, or "
        f"start the server with --model-alias {shlex.quote(shown)}"
    )
    raise ApiError(404, message, param="model", code="model_not_found")


async def parse(request: Request, schema: type[BaseModel]) -> BaseModel:
    """Return the body of a request; none stands for an empty object."""
    body = (await request.body()).removeprefix(codecs.BOM_UTF8) or b"{}"
    content_type = request.headers.get("content-type", "").lower()
    charset = content_type.partition("charset=")[2].partition(";")[0].strip(" \"'")
    if charset not in ("", "utf-8", "utf8", "us-ascii", "ascii"):
        raise ApiError(415, f"the body is said to be {charset[:40]!r}: send JSON in UTF-8")

    def validated() -> BaseModel:
        return schema.model_validate(from_json(body, allow_inf_nan=False))

    try:
        return validated() if len(body) <= SHORT_BYTES else await asyncio.to_thread(validated)
    except ValidationError as error:
        raise errors.from_validation(error) from None
    except ValueError as error:
        if content_type.startswith(_OTHER_FORMS):
            kind = content_type.partition(";")[0]
            message = f"the body is said to be {kind}: send JSON as application/json"
            raise ApiError(415, message) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class BodyRoute(APIRoute):
    """Reads the body by `parse`: its errors have the API's shape, and a long body does not block the loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        schema = cast("type[BaseModel]", field and field.field_info.annotation)
        endpoint = cast("Callable[..., Awaitable[Response]]", self.endpoint)

        async def answer(request: Request) -> Response:
            values = dict(request.path_params)
            if field is not None:
                values[field.name] = await parse(request, schema)
            return await endpoint(**values)

        return answer


_STREAMED: Any = {200: {"content": {"text/event-stream": {}}}}


def create_api(host: ModelHost, aliases: Collection[str]) -> FastAPI:
    """Return the app to mount at /v1: OpenAI's and Anthropic's API on the model that is loaded."""
    app = FastAPI(
        title="neo-desktop",
        version=version("neo-desktop"),
        description="The loaded model, for programs that speak OpenAI's or Anthropic's API.",
        servers=[{"url": "/v1"}],
        responses={"default": {"description": "The request is refused; the message says why."}},
        openapi_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.router.route_class = BodyRoute
    errors.install(app)
    created = int(time.time())
    store = ResponseStore()

    @app.exception_handler(SettingError)
    async def setting_error(request: Request, error: SettingError) -> Response:
        return ApiError(400, str(error), param=error.field).response(request.url.path)

    def post(
        path: str,
        summary: str,
        answer: Callable[[EngineService, Any], Awaitable[Response]],
        example: Json,
    ) -> None:
        known = (*aliases, ANTHROPICS) if path.startswith("/messages") else aliases

        async def endpoint(body: Any) -> Response:
            check_name(host.service, body.model, known)
            return await answer(check_name(await host.ready(), body.model, known), body)

        schema, shown = get_type_hints(answer)["body"], cast("Any", {"example": {"value": example}})
        endpoint.__annotations__["body"] = Annotated[schema, Body(openapi_examples=shown)]
        answers = _STREAMED if "stream" in schema.model_fields else {}
        app.post(path, summary=summary, responses=answers)(endpoint)

    async def respond(service: EngineService, body: responses.ResponsesRequest) -> Response:
        return await responses.answer(service, store, body)

    question = [{"role": "user", "content": "What is a KV cache?"}]
    body = {"model": "claude-any", "messages": question}
    asked = {"messages": question, "max_tokens": 64}
    kept = f"Answer with items (OpenAI); the last {MAX_RESPONSES:,} are kept in memory and can be continued"
    post("/chat/completions", "Answer a chat (OpenAI)", chat.answer, asked)
    post("/completions", "Continue texts", completions.answer, {"prompt": "A KV cache is"})
    post("/responses", kept, respond, {"input": "What is a KV cache?"})
    post("/messages", "Answer a chat (Anthropic)", messages.answer, body | asked)
    post("/messages/count_tokens", "Count tokens", messages.count_tokens, body)
    post("/embeddings", "Texts as vectors", embeddings.answer, {"input": ["a cat", "a dog"]})

    @app.get("/responses/{response_id}", summary="A stored response")
    async def stored_response(response_id: str) -> Response:
        return JSONResponse(store.get(response_id).body)

    @app.delete("/responses/{response_id}", summary="Forget a stored response")
    async def delete_response(response_id: str) -> Response:
        store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/models", summary="The model that is loaded")
    async def models() -> Response:
        cards = []
        if host.has_service:
            plain = [name for name in aliases if "*" not in name]
            names = dict.fromkeys([host.service.model_name, *plain])
            cards = [_model(host.service, name, created) for name in names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/models/{name:path}", summary="One model")
    async def one_model(name: str) -> Response:
        return JSONResponse(_model(check_name(host.service, name, aliases), name, created))

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
