"""POST /v1/responses: OpenAI's newer form, whose answers are lists of items and can be gone on with."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field, TypeAdapter

from neo_desktop.app.api.fields import (
    HINT,
    MAX_TOOLS,
    Json,
    Label,
    LeftOut,
    Model,
    Only,
    Skipped,
    Tagged,
    Unsupported,
    Verbosity,
)
from neo_desktop.app.api.pictures import shown_parts
from neo_desktop.app.api.replies import new_id
from neo_desktop.app.api.response_events import ResponseEvents
from neo_desktop.app.api.response_items import Item, ItemReference, MessageItem, for_template
from neo_desktop.app.api.response_store import ResponseStore, StoredResponse
from neo_desktop.app.api.response_tools import FunctionTool, ResponseTool, ResponseTools
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.conversation import Conversation, thinking_fields, thought_tokens
from neo_desktop.app.generate.outputs import Outputs, begin
from neo_desktop.app.generate.sampling import sampling_params
from neo_desktop.app.generate.structure import Structure
from neo_desktop.app.generate.tools import AUTO, REQUIRED, ToolChoice
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_LOGPROBS = "message.output_text.logprobs"
_NOT_THERE = "this server has no tools of its own; leave it out"
NO_CHOICE = {
    "allowed_tools": "leave the other tools out of tools instead",
    **dict.fromkeys(
        ("file_search", "web_search*", "computer*", "code_interpreter", "image_generation"), _NOT_THERE
    ),
    **dict.fromkeys(("mcp", "programmatic_tool_calling", "apply_patch", "shell"), _NOT_THERE),
}
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of items that never come.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class NamedTool(Model):
    type: Literal["function", "custom"]
    name: str


class TextFormat(Model):
    type: Literal["text", "json_object"]


class SchemaFormat(Model):
    type: Literal["json_schema"]
    name: Label = None
    description: Label = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None  # a schema that cannot be enforced in full is refused


class TextConfig(Model):
    format: Annotated[TextFormat | SchemaFormat, Tagged(TextFormat, SchemaFormat)] | None = None
    verbosity: Verbosity = None


class Reasoning(Model):
    """The effort of thinking; the answer holds the thoughts without a summary."""

    # A hint; not all models know levels of thought.
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Label = None
    generate_summary: Label = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None


class ResponseStreamOptions(Model):
    include_obfuscation: Annotated[bool | None, HINT] = None  # nothing is padded


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Model):
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    previous_response_id: str | None = None  # whose conversation continues
    store: bool | None = None  # unless false, the response can be asked for and gone on with
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Includable] | None = None

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool,
            Tagged(NamedTool, refused=NO_CHOICE, words=("none", "auto", "required")),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    context_management: Annotated[
        list[Json] | None, LeftOut("context_management is left out: the conversation is read as it was sent")
    ] = None

    # Labels and hints: they say nothing about the answer.
    metadata: Annotated[dict[str, str] | None, HINT] = None
    client_metadata: Annotated[Json | None, HINT] = None
    image: Annotated[Json | None, HINT] = None  # how images are read; there are none
    max_tool_calls: Annotated[int | None, HINT] = None  # of tools of the server's own
    prompt_cache_key: Label = None
    prompt_cache_options: Annotated[Json | None, HINT] = None
    prompt_cache_retention: Label = None
    safety_identifier: Label = None
    service_tier: Label = None  # there is one
    truncation: Label = None  # what is too long is refused
    user: Label = None

    access_programs: Unsupported = None
    background: Annotated[Any, Only(False)] = None
    background_options: Unsupported = None
    conversation: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return what was asked for; what was left open is the model's own recommendation.

        Raises:
            SettingError: a value is out of range.
        """
        logprobs = self.top_logprobs
        if logprobs is None and _LOGPROBS in (self.include or ()):
            logprobs = 0
        try:
            return sampling_params(
                defaults,
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logprobs=logprobs,
            )
        except SettingError as error:
            raise error.named({"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}) from error

    def conversation_of(
        self, items: Sequence[Item], tools: ResponseTools, template: str | None
    ) -> Conversation:
        """Return the continued conversation, for the model with this template.

        Raises:
            ApiError: the template cannot do what is asked for.
        """
        messages = for_template(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise ApiError(400, "input must hold at least one item", param="input")
        choice: ToolChoice | None
        if isinstance(self.tool_choice, NamedTool):
            choice = ToolChoice(is_required=True, name=tools.full_name(self.tool_choice.name))
        else:
            choice = {None: AUTO, "auto": AUTO, "none": None, "required": REQUIRED}[self.tool_choice]
        effort = self.reasoning.effort if self.reasoning else None
        return Conversation(
            messages=messages,
            tools=tools.tools,
            choice=choice,
            is_parallel=self.parallel_tool_calls is not False,
            template_fields=thinking_fields(template, effort, is_hint=True),
            structure=self._structure(),
            thought_tokens=thought_tokens(template, effort, None),
            field="input",
        )

    def _structure(self) -> Structure | None:
        form = self.text.format if self.text else None
        if isinstance(form, SchemaFormat):
            return Structure("text.format", "json_schema", form.schema_, bool(form.strict))
        is_json = form is not None and form.type == "json_object"
        return Structure("text.format", "json") if is_json else None

    def head(self, model: str, params: SamplingParams) -> Json:
        """The response as long as nothing has come: what was asked for, with what was left open filled in."""
        tools = [_told(tool) for tool in self.tools or () if not isinstance(tool, Skipped)]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, Model) else self.tool_choice
        form = self.text.format if self.text else None
        form_body = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": params.temperature,
            "text": {"format": form_body},
            "tool_choice": choice or "auto",
            "tools": tools,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": "disabled",
            "usage": None,
            "user": self.user,
        }


def _told(tool: Model) -> Json:
    empty: Json = (
        {"strict": None, "description": None, "parameters": {}} if isinstance(tool, FunctionTool) else {}
    )
    return empty | tool.model_dump(exclude_none=True, by_alias=True)


async def answer(service: EngineService, store: ResponseStore, body: ResponsesRequest) -> Response:
    """Answer, in one piece or as a stream of events."""
    params = body.sampling_params(service.sampling_defaults)
    earlier: Sequence[Item] = ()
    if body.previous_response_id is not None:
        earlier = store.get(body.previous_response_id, "previous_response_id").items
    new = [store.item(item.id) if isinstance(item, ItemReference) else item for item in body.input]
    items = [*earlier, *new]
    tools = ResponseTools(body.tools or ())
    conversation = body.conversation_of(items, tools, service.tokenizer.chat_template)
    outputs = await begin(service, conversation, params)
    events = ResponseEvents(
        body.head(service.model_name, params), tools, service.tokenizer, params.logprobs is not None
    )

    def keep() -> None:
        if body.store is not False:
            answer_items = _ITEMS.validate_python(events.response["output"])
            store.add(StoredResponse(events.response, new, [*items, *answer_items]))

    if body.stream:
        return EventStream(_streamed(outputs, events, keep), outputs)
    async with outputs:
        async for step in outputs:
            events.add(step)
    events.end(outputs.usage)
    keep()
    return JSONResponse(events.response)


async def _streamed(
    outputs: Outputs, events: ResponseEvents, keep: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield the response while it grows; an error is the last event."""
    for body in events.begin():
        yield event(body, body["type"])
    try:
        async for step in outputs:
            for body in events.add(step):
                yield event(body, body["type"])
        last = events.end(outputs.usage)
        keep()
    except ApiError as error:
        last = events.fail(error)
    for body in last:
        yield event(body, body["type"])


def input_items(response: StoredResponse) -> Json:
    """Return the new items of a response's request."""
    items = []
    for number, item in enumerate(response.input_items):
        fields = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = shown_parts(item.content, kind)
        items.append({"id": f"item_{number}", "status": "completed"} | fields)
    ids = (
        {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        if items
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": items, "has_more": False} | ids
