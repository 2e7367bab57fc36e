"""The input of a response: items of its conversation, and tools."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from neo_desktop.app.api.fields import (
    NOT_TEXT,
    Function,
    Json,
    Model,
    Skipped,
    Tagged,
    ToolName,
)
from neo_desktop.app.api.pictures import ContentWithImages
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.history import arguments_of, function_call
from neo_desktop.app.generate.tools import Tool
from neo_desktop.app.web.warnings import warn

_HOSTED = "is left out: this server has no tools of its own"
_AS_FUNCTION = "is left out: describe it as a function"
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

    def for_template(self, arguments: object) -> Json:
        return function_call(self.call_id, full_name(self.name, self.namespace), arguments)


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str  # JSON


class CustomCallItem(CallItem):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    input: str


class OutputItem(Model):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: ContentWithImages
    id: str | None = None
    name: Any = None
    namespace: Any = None


class ItemReference(Model):
    type: Literal["item_reference"]
    id: str


Item = Annotated[
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
            case FunctionCallItem() | CustomCallItem():
                if not is_assistants:
                    messages.append({"role": "assistant", "content": ""})
                if isinstance(item, CustomCallItem):
                    call = item.for_template({"input": item.input})
                else:
                    call = item.for_template(arguments_of(item.arguments))
                messages[-1].setdefault("tool_calls", []).append(call)
        is_assistants = messages[-1]["role"] == "assistant"
        if is_assistants and thought:
            messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages


class FunctionTool(Function):
    type: Literal["function"]


class TextInput(Model):
    type: Literal["text"]


class GrammarInput(Model):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Model):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Tagged()] | None = None

    def tool(self, name: str) -> Tool:
        """A function of one text; a regular expression holds where a call must come."""
        text: Json = {"type": "string"}
        description = self.description
        if isinstance(self.format, GrammarInput):
            form = f"The input follows this {self.format.syntax}:\n{self.format.definition}"
            description = "\n".join(filter(None, (description, form)))
            if self.format.syntax == "regex":
                text["pattern"] = f"^(?:{self.format.definition})$"
            else:
                warn(f"the grammar of the tool {name!r} is shown to the model, which may not follow it")
        parameters = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        return Tool(name, description, parameters)


_ClientTool = Annotated[FunctionTool | CustomTool, Tagged()]


class NamespaceTool(Model):
    """Tools whose names begin with one word."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[_ClientTool]


ResponseTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | Skipped,
    Tagged(
        left_out={
            **dict.fromkeys(("web_search*", "file_search", "code_interpreter", "image_generation"), _HOSTED),
            **dict.fromkeys(("computer*", "mcp", "tool_search", "programmatic_tool_calling"), _HOSTED),
            **dict.fromkeys(("local_shell", "shell", "apply_patch"), _AS_FUNCTION),
        },
    ),
]


class ResponseTools:
    """The tools as the model sees them, each with a name of its own."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self.tools: list[Tool] = []
        self._own: dict[str, tuple[FunctionTool | CustomTool, str | None]] = {}  # tool and namespace, by name
        for tool, namespace in _flat(tools):
            name = full_name(tool.name, namespace)
            if name in self._own:
                raise ApiError(400, f"tools holds two tools of the name {name!r}: rename one", param="tools")
            self.tools.append(tool.tool(name))
            self._own[name] = tool, namespace

    def full_name(self, name: str) -> str:
        """The name under which the model sees a tool that a client calls by its own name."""
        return next((full for full, (tool, _) in self._own.items() if tool.name == name), name)

    def item(self, name: str) -> Json:
        """Return the first fields of the item of a call; models may call unknown tools."""
        tool, namespace = self._own.get(name, (None, None))
        item: Json = {"type": "function_call", "name": tool.name if tool else name}
        if isinstance(tool, CustomTool):
            item["type"] = "custom_tool_call"
        return item | ({"namespace": namespace} if namespace else {})


def _flat(tools: Sequence[Any]) -> Iterator[tuple[FunctionTool | CustomTool, str | None]]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((each, tool.name) for each in tool.tools)
        elif not isinstance(tool, Skipped):
            yield tool, None


def full_name(name: str, namespace: str | None) -> str:
    """A tool's name as the model sees it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
