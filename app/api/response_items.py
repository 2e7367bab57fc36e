"""The items of a response's conversation: messages, thoughts, calls and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from neo_desktop.app.api.fields import Content, Json, Model, Only
from neo_desktop.app.api.history import arguments_of

Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Model):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningText(Model):
    """What the model thought, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Model):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[Any, Only("")] = None
    status: Status | None = None


class FunctionCallItem(Model):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Model):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


def _with_type(item: object) -> object:
    """Messages may leave their type out."""
    return {"type": "message"} | item if isinstance(item, dict) and "role" in item else item


Item = Annotated[
    Annotated[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem, Field(discriminator="type")
    ],
    BeforeValidator(_with_type),
]


def for_template(items: Sequence[Item]) -> list[Json]:
    """The items as chat templates expect them: thoughts and calls are part of the assistant's message."""
    messages: list[Json] = []
    thought = ""
    is_assistants = False  # the last message is the assistant's, and this item belongs to it
    for item in items:
        if isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or item.summary or ())
            is_assistants = False
            continue
        if isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, FunctionCallItem):
            if not is_assistants:
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
        is_assistants = messages[-1]["role"] == "assistant"
        if is_assistants and thought:
            messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages


def _call(item: FunctionCallItem) -> Json:
    function = {"name": item.name, "arguments": arguments_of(item.arguments)}
    return {"id": item.call_id, "type": "function", "function": function}
