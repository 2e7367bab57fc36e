"""POST /v1/responses: OpenAI's newer form, whose answers are lists of items and can be gone on with."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field, TypeAdapter

from neo_desktop.app.api.conversation import Conversation, thinking_fields
from neo_desktop.app.api.fields import MAX_TOOLS, Json, Model, Only, Unsupported, described
from neo_desktop.app.api.outputs import Outputs, begin
from neo_desktop.app.api.replies import new_id
from neo_desktop.app.api.response_events import ResponseEvents
from neo_desktop.app.api.response_items import Item, MessageItem, for_template
from neo_desktop.app.api.response_store import ResponseStore, StoredResponse
from neo_desktop.app.api.sampling import sampling_params
from neo_desktop.app.api.structure import Structure
from neo_desktop.app.api.tools import AUTO, REQUIRED, Tool, ToolChoice
from neo_desktop.app.service import EngineService
from neo_desktop.app.service_errors import ServiceError
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.app.web.errors import ApiError, from_service
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_LOGPROBS = "message.output_text.logprobs"


class ResponseTool(Model):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None  # JSON schema
    strict: bool | None = None  # a call that must come always follows the schema


class NamedTool(Model):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Model):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None  # the schema always holds


class TextConfig(Model):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Only("medium")] = None


class Reasoning(Model):
    """How much the model thinks; what it thinks is told as it is, without a summary."""

    # A hint; not all models know levels of thought.
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Model):
    """Extras of a stream."""

    include_obfuscation: Annotated[Any, Only(False)] = None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Model):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    previous_response_id: str | None = None  # whose conversation goes on
    store: bool | None = None  # unless false, the response can be asked for and gone on with
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        described('"none", "auto", "required" or {"type": "function", "name": …}'),
    ] = None
    parallel_tool_calls: bool | None = None

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    background: Annotated[Any, Only(False)] = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    truncation: Annotated[Any, Only("disabled")] = None

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

    def conversation_of(self, items: Sequence[Item], template: str | None) -> Conversation:
        """The conversation that goes on, for the model with this template.

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
            choice = ToolChoice(is_required=True, name=self.tool_choice.name)
        else:
            choice = {None: AUTO, "auto": AUTO, "none": None, "required": REQUIRED}[self.tool_choice]
        effort = self.reasoning.effort if self.reasoning else None
        return Conversation(
            messages=messages,
            tools=[
                Tool(tool.name, tool.description, tool.parameters or {}, bool(tool.strict))
                for tool in self.tools or ()
            ],
            choice=choice,
            is_parallel=self.parallel_tool_calls is not False,
            template_fields=thinking_fields(template, effort, is_hint=True),
            structure=self._structure(),
            field="input",
        )

    def _structure(self) -> tuple[str, Structure] | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return "text.format", Structure("json")
        if form.schema_ is None:
            raise ApiError(400, "text.format needs a schema", param="text.format")
        return "text.format", Structure("json_schema", form.schema_, bool(form.strict))

    def head(self, model: str, params: SamplingParams) -> Json:
        """The response as long as nothing has come: what was asked for, with what was left open filled in."""
        tools = [
            {"strict": None, "description": None, "parameters": {}} | tool.model_dump(exclude_none=True)
            for tool in self.tools or ()
        ]
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


async def answer(
    service: EngineService, store: ResponseStore, body: ResponsesRequest, params: SamplingParams
) -> Response:
    """Answer, in one piece or as a stream of events."""
    earlier: Sequence[Item] = ()
    if body.previous_response_id is not None:
        earlier = store.get(body.previous_response_id, "previous_response_id").items
    items = [*earlier, *body.input]
    conversation = body.conversation_of(items, service.tokenizer.chat_template)
    outputs = await begin(service, conversation, params)
    events = ResponseEvents(
        body.head(service.model_name, params), service.tokenizer, params.logprobs is not None
    )

    def keep() -> None:
        if body.store is not False:
            answer_items = _ITEMS.validate_python(events.response["output"])
            store.add(StoredResponse(events.response, body.input, [*items, *answer_items]))

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
    except ServiceError as error:
        last = events.fail(from_service(error))
    except ApiError as error:
        last = events.fail(error)
    for body in last:
        yield event(body, body["type"])


def input_items(response: StoredResponse) -> Json:
    """What was new in a response's request, as a list of items."""
    items = []
    for number, item in enumerate(response.input_items):
        fields = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": item.content}]
        items.append({"id": f"item_{number}", "status": "completed"} | fields)
    ids = (
        {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        if items
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": items, "has_more": False} | ids
