"""POST /v1/responses: OpenAI's newer form: answers are lists of items, which a later request continues."""

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field, TypeAdapter

from neo_desktop.app.api.fields import MAX_TOOLS, Json, Model, SchemaFormat, Skipped, Tagged
from neo_desktop.app.api.replies import new_id
from neo_desktop.app.api.response_events import ResponseEvents
from neo_desktop.app.api.response_items import Item, ItemReference, ResponseTool, ResponseTools, for_template
from neo_desktop.app.api.sampling import SampledRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.conversation import Conversation, thinking_fields, thought_tokens
from neo_desktop.app.generate.outputs import Outputs, begin
from neo_desktop.app.generate.structure import Structure
from neo_desktop.app.generate.tools import CHOICES, ToolChoice
from neo_desktop.app.web.connection import EventStream
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults

MAX_RESPONSES = 1000  # that are stored
MAX_STORED_BYTES = 64 * 2**20

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_LOGPROBS = "message.output_text.logprobs"
_NOT_THERE = "this server has no tools of its own; leave it out"
NO_CHOICE = {
    "allowed_tools": "leave the other tools out of tools instead",
    **dict.fromkeys(("file_search", "web_search*", "computer*", "code_interpreter", "mcp"), _NOT_THERE),
    **dict.fromkeys(("image_generation", "programmatic_tool_calling", "apply_patch", "shell"), _NOT_THERE),
}


class NamedTool(Model):
    type: Literal["function", "custom"]
    name: str


class TextFormat(Model):
    type: Literal["text", "json_object"]


class TextConfig(Model):
    format: Annotated[TextFormat | SchemaFormat, Tagged()] | None = None


class Reasoning(Model):
    """The effort of thinking; the answer holds the thoughts without a summary."""

    # A hint; not all models know levels of thought.
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(SampledRequest):
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    previous_response_id: str | None = None  # whose conversation continues
    store: bool | None = None  # unless false, a later request may ask for the response or continue it
    stream: bool | None = None
    include: list[str] | None = None  # the rest is of items that never come

    max_tokens: int | None = Field(default=None, alias="max_output_tokens")
    temperature: float | None = None
    top_p: float | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(default=None, alias="top_logprobs")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedTool, Tagged(refused=NO_CHOICE)] | None
    ) = None
    parallel_tool_calls: bool | None = None

    metadata: dict[str, str] | None = None  # it comes back with the response
    image: Any = None  # how images are read; there are none

    def sampling_params(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        is_included = _LOGPROBS in (self.include or ())
        logprobs = 0 if self.logprobs is None and is_included else self.logprobs
        return super().sampling_params(defaults, logprobs=logprobs, **more)

    def conversation_of(
        self, items: Sequence[Item], tools: ResponseTools, template: str | None
    ) -> Conversation:
        messages = for_template(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise SettingError("input", "must hold at least one item")
        if isinstance(self.tool_choice, NamedTool):
            choice: ToolChoice | None = ToolChoice(
                is_required=True, name=tools.full_name(self.tool_choice.name)
            )
        else:
            choice = CHOICES[self.tool_choice or "auto"]
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
        """The response as long as nothing has come."""
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, Model) else self.tool_choice
        form = self.text.format if self.text else None
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
            "max_output_tokens": self.max_tokens,
            "metadata": self.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": [
                tool.model_dump(by_alias=True) for tool in self.tools or () if not isinstance(tool, Skipped)
            ],
            "top_logprobs": self.logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": "disabled",
            "usage": None,
        }


class StoredResponse(NamedTuple):
    body: Json
    items: Sequence[Item]  # from the conversation's beginning to this answer


class ResponseStore:
    """In memory: the oldest ones make room, and all end with the server."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes: dict[str, int] = {}  # about what each takes

    def add(self, response: StoredResponse) -> None:
        response_id = response.body["id"]
        self._responses[response_id] = response
        num_bytes = len(json.dumps(response.body)) + sum(len(repr(item)) for item in response.items)
        self._num_bytes[response_id] = num_bytes
        while len(self._responses) > MAX_RESPONSES or sum(self._num_bytes.values()) > MAX_STORED_BYTES:
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a response; `field` of the body names it."""
        if response_id not in self._responses:
            kept = f"the last {MAX_RESPONSES} are kept until the server ends, if there is room"
            message = f"there is no response {response_id!r}: {kept}"
            raise ApiError(404, message, param=field, code="response_not_found")
        self._responses.move_to_end(response_id)
        return self._responses[response_id]

    def item(self, item_id: str) -> Item:
        for response in reversed(self._responses.values()):
            for item in reversed(response.items):
                if getattr(item, "id", None) == item_id:
                    return item
        message = f"there is no item {item_id[:100]!r} in the responses that are stored: send the item itself"
        raise ApiError(400, message, param="input")

    def remove(self, response_id: str) -> None:
        self.get(response_id)
        del self._responses[response_id], self._num_bytes[response_id]


async def answer(service: EngineService, store: ResponseStore, body: ResponsesRequest) -> Response:
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
            store.add(StoredResponse(events.response, [*items, *answer_items]))

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
    yield events.take()
    try:
        async for step in outputs:
            events.add(step)
            yield events.take()
        events.end(outputs.usage)
        keep()
    except ApiError as error:
        events.fail(error)
    yield events.take()
