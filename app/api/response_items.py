"""The items of a response's conversation: messages, thoughts, calls and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from neo_desktop.app.api.fields import NOT_TEXT, Content, Json, Model, Skipped, Tagged
from neo_desktop.app.api.pictures import ContentWithImages
from neo_desktop.app.api.response_tools import full_name
from neo_desktop.app.generate.history import arguments_of

_NO_RESULT = "is left out: it tells of a tool of another server's"


class MessageItem(Model):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ContentWithImages
    id: str | None = None


class ReasoningText(Model):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_Thoughts = list[Annotated[ReasoningText, Tagged()]]


class ReasoningItem(Model):
    type: Literal["reasoning"]
    id: str | None = None
    summary: _Thoughts | None = None
    content: _Thoughts | None = None


class CallItem(Model):
    """The common fields of calls."""

    call_id: str
    name: str
    namespace: str | None = None
    id: str | None = None

    def for_template(self) -> Json:
        function = {"name": full_name(self.name, self.namespace), "arguments": self.parsed()}
        return {"id": self.call_id, "type": "function", "function": function}

    def parsed(self) -> Any:
        raise NotImplementedError


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str  # JSON

    def parsed(self) -> Any:
        return arguments_of(self.arguments)


class CustomCallItem(CallItem):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    input: str

    def parsed(self) -> Any:
        return {"input": self.input}


class OutputItem(Model):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    name: Any = None
    namespace: Any = None


class ItemReference(Model):
    type: Literal["item_reference"]
    id: str


def _with_type(item: object) -> object:
    """Messages and references may leave their type out."""
    if not isinstance(item, dict) or item.get("type"):
        return item
    if "role" in item:
        return item | {"type": "message"}
    return item | {"type": "item_reference"} if item.keys() <= {"id", "type"} else item


_Union = Annotated[
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem | ItemReference | Skipped,
    Tagged(
        refused={
            **NOT_TEXT,
            "compaction": "only its maker can read it; send the messages themselves",
            "compaction_trigger": "this server compacts nothing; leave it out",
            "additional_tools": "name all tools in tools",
            "configuration_update": "send the settings of this request in its own fields",
        },
        left_out={
            **dict.fromkeys(("web_search_call", "file_search_call", "code_interpreter_call"), _NO_RESULT),
            **dict.fromkeys(("image_generation_call", "computer_call*", "mcp_*", "program*"), _NO_RESULT),
            **dict.fromkeys(("tool_search_*", "local_shell_*", "shell_*", "apply_patch_*"), _NO_RESULT),
        },
    ),
]
Item = Annotated[_Union, BeforeValidator(_with_type)]


def for_template(items: Sequence[Any]) -> list[Json]:
    """The items as chat templates expect them: thoughts and calls are part of the assistant's message."""
    messages: list[Json] = []
    thought = ""
    is_assistants = False  # the last message is the assistant's, and this item belongs to it
    for item in items:
        match item:
            case Skipped():
                continue
            case ReasoningItem():
                thought = "\n".join(part.text for part in item.content or item.summary or ())
                is_assistants = False
                continue
            case OutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": item.content})
            case CallItem():
                if not is_assistants:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(item.for_template())
        is_assistants = messages[-1]["role"] == "assistant"
        if is_assistants and thought:
            messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages
