"""/openapi.json: what the API takes and gives, in OpenAPI 3.1."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from neo_desktop.app.api import reply_schemas as replies
from neo_desktop.app.api.chat import ChatCompletionRequest
from neo_desktop.app.api.completions import CompletionRequest
from neo_desktop.app.api.embeddings import EmbeddingRequest
from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.messages import CountTokensRequest, MessagesRequest
from neo_desktop.app.api.response_store import MAX_RESPONSES
from neo_desktop.app.api.responses import ResponsesRequest

_REFERENCE = "#/components/schemas/{model}"
_QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_WEATHER = {"name": "weather", "description": "The weather of a place."}

# Statuses that any route may answer with, beside those of its own.
_REFUSALS = {
    400: "A field cannot be used; the message names it.",
    401: "The key is missing or wrong.",
    403: "The host or the origin is not allowed.",
    404: "There is no such model or response.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    500: "The engine failed.",
    503: "Too many requests wait, no model is loaded, or the server ends: try again later.",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask the server."""

    method: str
    path: str
    summary: str
    reply: Any  # type of the answer; None: it is described by `media_type` alone
    body: Any = None  # type of the request's body
    examples: tuple[tuple[str, Json], ...] = ()
    streams: bool = False  # with stream=true, the answer is a stream of events
    media_type: str = "application/json"

    @property
    def error(self) -> Any:
        """The type of its refusals."""
        return replies.AnthropicError if self.path.startswith("/v1/messages") else replies.Error

    @property
    def parameters(self) -> list[Json]:
        """What stands in braces in its path."""
        names = [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
        return [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]


_TOOL = {"type": "function", "function": {**_WEATHER, "parameters": _PLACE}}
_FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": _PLACE}}

ROUTES = (
    Route(
        "post",
        "/v1/chat/completions",
        "Answer a chat (OpenAI)",
        replies.ChatCompletion,
        ChatCompletionRequest,
        (
            ("A question", {"messages": _QUESTION, "max_tokens": 64}),
            ("A tool", {"messages": _QUESTION, "max_tokens": 64, "tools": [_TOOL]}),
            ("An answer of this form", {"messages": _QUESTION, "max_tokens": 64, "response_format": _FORM}),
        ),
        streams=True,
    ),
    Route(
        "post",
        "/v1/completions",
        "Go on with texts",
        replies.Completion,
        CompletionRequest,
        (("A text", {"prompt": "A KV cache is", "max_tokens": 32}),),
        streams=True,
    ),
    Route(
        "post",
        "/v1/responses",
        f"Answer with items (OpenAI); the last {MAX_RESPONSES:,} are kept in memory, to be gone on with",
        replies.ResponseBody,
        ResponsesRequest,
        (("A question", {"input": "What is a KV cache?", "max_output_tokens": 64}),),
        streams=True,
    ),
    Route("get", "/v1/responses/{response_id}", "A stored response", replies.ResponseBody),
    Route("delete", "/v1/responses/{response_id}", "Forget a stored response", replies.DeletedResponse),
    Route("get", "/v1/responses/{response_id}/input_items", "What a response answers", replies.ItemList),
    Route(
        "post",
        "/v1/messages",
        "Answer a chat (Anthropic)",
        replies.AnthropicAnswer,
        MessagesRequest,
        (("A question", {"model": "MODEL", "messages": _QUESTION, "max_tokens": 64}),),
        streams=True,
    ),
    Route(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a chat (Anthropic)",
        replies.TokenCount,
        CountTokensRequest,
        (("A question", {"model": "MODEL", "messages": _QUESTION}),),
    ),
    Route(
        "post",
        "/v1/embeddings",
        "Texts as vectors",
        replies.Embeddings,
        EmbeddingRequest,
        (("Two texts", {"input": ["a cat", "a dog"]}),),
    ),
    Route("get", "/v1/models", "The model that is loaded", replies.ModelList),
    Route("get", "/v1/models/{name}", "One model", replies.ModelCard),
    Route("get", "/health", "Whether requests are answered", replies.Health),
    Route("get", "/metrics", "Figures for Prometheus", None, media_type="text/plain"),
)


@cache
def document() -> bytes:
    """The whole description, as JSON."""
    types = {kind for route in ROUTES for kind in (route.body, route.reply, route.error) if kind is not None}
    named = sorted(types, key=lambda kind: str(kind.__name__))
    schemas, definitions = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter(kind)) for kind in named], ref_template=_REFERENCE
    )
    references = {name: schema for (name, _), schema in schemas.items()}
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, references)
    body = {
        "openapi": "3.1.0",
        "info": {
            "title": "neo-desktop",
            "version": version("neo-desktop"),
            "description": "The loaded model, for programs that speak OpenAI's or Anthropic's API.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
    return json.dumps(body).encode()


def _operation(route: Route, references: dict[str, Any]) -> Json:
    content: Json = {route.media_type: {}}
    if route.reply is not None:
        content[route.media_type] = {"schema": references[route.reply.__name__]}
    if route.streams:
        content["text/event-stream"] = {}
    answers: Json = {"200": {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": references[route.error.__name__]}}
    for status, description in _REFUSALS.items():
        answers[str(status)] = {"description": description, "content": error}
    if route.path == "/health":
        answers["503"] = {"description": "Requests are not answered at present.", "content": content}
    operation: Json = {"summary": route.summary, "operationId": _name(route), "responses": answers}
    if route.parameters:
        operation["parameters"] = route.parameters
    if route.body is not None:
        examples = {title: {"value": value} for title, value in route.examples}
        schema = references[route.body.__name__]
        body = {"application/json": {"schema": schema, "examples": examples}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _name(route: Route) -> str:
    words = [part.strip("{}") for part in route.path.split("/") if part and part != "v1"]
    return "_".join([route.method, *words])
