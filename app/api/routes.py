"""The routes under /v1."""

import re
import shlex
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Annotated, Any, TypeVar, cast

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from neo_desktop.app.api import chat, completions, embeddings, messages, responses
from neo_desktop.app.api import reply_schemas as replies
from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.response_store import MAX_RESPONSES, ResponseStore
from neo_desktop.app.engines.limits import DEFAULT_LIMITS
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web import errors
from neo_desktop.app.web.body import parse
from neo_desktop.engine.errors import SettingError

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

    def check(self, service: EngineService, name: str | None) -> EngineService:
        """Return the service if this is its model's name; None names any model.

        Raises:
            ApiError: another model is named.
        """
        if name in (None, service.model_name) or (self._pattern and self._pattern.fullmatch(name or "")):
            return service
        shown = (name or "")[:100]
        message = (
            f"the model {shown!r} is not served here, but {service.model_name!r} is: ask for that one, or "
            f"start the server with --model-alias {shlex.quote(shown)}"
        )
        raise ApiError(404, message, param="model", code="model_not_found")


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


_QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_WEATHER = {"name": "weather", "description": "The weather of a place.", "parameters": _PLACE}
_CHAT = {"messages": _QUESTION, "max_tokens": 64}
_STREAMED: Any = {200: {"content": {"text/event-stream": {}}}}
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def _examples(**values: Json) -> Any:
    return Body(openapi_examples={name.replace("_", " "): {"value": value} for name, value in values.items()})


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
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.router.route_class = BodyRoute
    errors.install(app)
    created = int(time.time())
    store = ResponseStore()

    @app.exception_handler(SettingError)
    async def setting_error(request: Request, error: SettingError) -> Response:
        return ApiError(400, str(error), param=error.field).response(request.url.path)

    def route(
        method: str, path: str, reply: Any, summary: str, *, streams: bool = False
    ) -> Callable[[_Endpoint], _Endpoint]:
        error = replies.AnthropicError if path.startswith("/messages") else replies.Error
        refusal = {"model": error, "description": "The request is refused; the message says why."}
        return app.api_route(
            path,
            methods=[method],
            response_model=reply,
            summary=summary,
            responses={"default": refusal} | (_STREAMED if streams else {}),
        )

    def check_length(messages: Sequence[object], field: str = "messages") -> None:
        if len(messages) > max_messages:
            message = f"{field} holds {len(messages)} messages, more than the {max_messages} that it may hold"
            raise ApiError(400, message, param=field)

    @route("POST", "/chat/completions", replies.ChatCompletion, "Answer a chat (OpenAI)", streams=True)
    async def chat_completions(
        body: Annotated[
            chat.ChatCompletionRequest,
            _examples(
                A_question=_CHAT,
                A_tool=_CHAT | {"tools": [{"type": "function", "function": _WEATHER}]},
                An_answer_of_this_form=_CHAT
                | {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "place", "schema": _PLACE},
                    }
                },
            ),
        ],
    ) -> Response:
        service = names.check(host.service, body.model)
        check_length(body.messages)
        return await chat.answer(service, body)

    @route("POST", "/completions", replies.Completion, "Continue texts", streams=True)
    async def raw_completions(
        body: Annotated[
            completions.CompletionRequest, _examples(A_text={"prompt": "A KV cache is", "max_tokens": 32})
        ],
    ) -> Response:
        return await completions.answer(names.check(host.service, body.model), body)

    @route("POST", "/messages", replies.AnthropicAnswer, "Answer a chat (Anthropic)", streams=True)
    async def anthropic_messages(
        body: Annotated[messages.MessagesRequest, _examples(A_question=_CHAT | {"model": "claude-any"})],
    ) -> Response:
        service = anthropics_names.check(host.service, body.model)
        check_length(body.messages)
        return await messages.answer(service, body)

    @route("POST", "/messages/count_tokens", replies.TokenCount, "Count the tokens of a chat (Anthropic)")
    async def count_tokens(
        body: Annotated[
            messages.CountTokensRequest, _examples(A_question={"model": "claude-any", "messages": _QUESTION})
        ],
    ) -> Response:
        service = anthropics_names.check(host.service, body.model)
        check_length(body.messages)
        return await messages.count_tokens(service, body)

    @route(
        "POST",
        "/responses",
        replies.ResponseBody,
        f"Answer with items (OpenAI); the last {MAX_RESPONSES:,} are kept in memory and can be continued",
        streams=True,
    )
    async def create_response(
        body: Annotated[
            responses.ResponsesRequest,
            _examples(A_question={"input": "What is a KV cache?", "max_output_tokens": 64}),
        ],
    ) -> Response:
        service = names.check(host.service, body.model)
        check_length(body.input, "input")
        return await responses.answer(service, store, body)

    @app.post("/responses/{name}", include_in_schema=False)
    async def no_response_action(name: str) -> Response:
        raise ApiError(404, f"there is no /v1/responses/{name} to post to")

    @route("GET", "/responses/{response_id}", replies.ResponseBody, "A stored response")
    async def stored_response(response_id: str) -> Response:
        return JSONResponse(store.get(response_id).body)

    @route("DELETE", "/responses/{response_id}", replies.DeletedResponse, "Forget a stored response")
    async def delete_response(response_id: str) -> Response:
        store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @route("GET", "/responses/{response_id}/input_items", replies.ItemList, "The new items of a request")
    async def input_items(response_id: str) -> Response:
        return JSONResponse(responses.input_items(store.get(response_id)))

    @route("POST", "/embeddings", replies.Embeddings, "Texts as vectors")
    async def create_embeddings(
        body: Annotated[embeddings.EmbeddingRequest, _examples(Two_texts={"input": ["a cat", "a dog"]})],
    ) -> Response:
        return await embeddings.answer(names.check(host.service, body.model), body)

    @route("GET", "/models", replies.ModelList, "The model that is loaded")
    async def models() -> Response:
        served = [host.service] if host.has_service else []
        cards = [_model(service, name, created) for service in served for name in names.of(service)]
        return JSONResponse({"object": "list", "data": cards})

    @route("GET", "/models/{name:path}", replies.ModelCard, "One model")
    async def one_model(name: str) -> Response:
        return JSONResponse(_model(names.check(host.service, name), name, created))

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
