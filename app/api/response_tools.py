"""The tools of a response: functions, and what OpenAI's agents send beside them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from neo_desktop.app.api.fields import HINT, Json, Model, Only, Skipped, Tagged
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.tools import Tool
from neo_desktop.app.web.warnings import warn

_HOSTED = "is left out: this server has no tools of its own"
LOCAL_SHELL = "local_shell"
_SHELL_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The program and its arguments.",
        },
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}

CallKind = Literal["function_call", "custom_tool_call", "local_shell_call"]


class Callable(Model):
    """The common fields of tools that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    defer_loading: Annotated[bool | None, HINT] = None  # all tools are shown
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    # `async` is a word of Python's.
    async_: Annotated[Any, Only(False)] = Field(default=None, alias="async")


class FunctionTool(Callable):
    type: Literal["function"]
    parameters: Json | None = None  # JSON schema
    strict: bool | None = None  # a schema that cannot be enforced in full is refused
    output_schema: Annotated[Json | None, HINT] = None

    def tool(self, name: str) -> Tool:
        """The same for every protocol."""
        return Tool(name, self.description, self.parameters or {}, bool(self.strict))


class TextInput(Model):
    type: Literal["text"]


class GrammarInput(Model):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Callable):
    type: Literal["custom"]
    format: Annotated[TextInput | GrammarInput, Tagged(TextInput, GrammarInput)] | None = None

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


class LocalShellTool(Model):
    type: Literal["local_shell"]


class NamespaceTool(Model):
    """Tools whose names begin with one word."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Tagged(FunctionTool, CustomTool)]]


ResponseTool = Annotated[
    FunctionTool | CustomTool | LocalShellTool | NamespaceTool | Skipped,
    Tagged(
        *(FunctionTool, CustomTool, LocalShellTool, NamespaceTool),
        left_out={
            **dict.fromkeys(("web_search*", "file_search", "code_interpreter", "image_generation"), _HOSTED),
            **dict.fromkeys(("computer*", "mcp", "tool_search", "programmatic_tool_calling"), _HOSTED),
            **dict.fromkeys(("shell", "apply_patch"), "is left out: describe it as a function"),
        },
    ),
]


@dataclass(frozen=True, slots=True)
class Route:
    """The form of a tool's calls for the client."""

    kind: CallKind
    name: str
    namespace: str | None = None


class ResponseTools:
    """The tools as the model sees them, each with a name of its own.

    Raises:
        ApiError: two have the same name.
    """

    def __init__(self, tools: Sequence[Any]) -> None:
        self.tools: list[Tool] = []
        self._routes: dict[str, Route] = {}
        for name, tool, route in _flat(tools):
            if name in self._routes:
                raise ApiError(400, f"tools holds two tools of the name {name!r}: rename one", param="tools")
            self.tools.append(tool)
            self._routes[name] = route

    def full_name(self, name: str) -> str:
        """The name under which the model sees a tool that a client calls by its own name."""
        return next((full for full, route in self._routes.items() if route.name == name), name)

    def route(self, name: str) -> Route:
        """Return the form of a call; models may call unknown tools."""
        return self._routes.get(name, Route("function_call", name))


def _flat(tools: Sequence[Any]) -> Iterator[tuple[str, Tool, Route]]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for each in tool.tools:
                name = full_name(each.name, tool.name)
                shown = each.tool(name)
                yield name, shown, Route(_kind(each), each.name, tool.name)
        elif isinstance(tool, LocalShellTool):
            shown = Tool(LOCAL_SHELL, "Runs a command on the user's computer.", _SHELL_PARAMETERS)
            yield LOCAL_SHELL, shown, Route("local_shell_call", LOCAL_SHELL)
        elif isinstance(tool, FunctionTool | CustomTool):
            yield tool.name, tool.tool(tool.name), Route(_kind(tool), tool.name)


def _kind(tool: FunctionTool | CustomTool) -> CallKind:
    return "custom_tool_call" if isinstance(tool, CustomTool) else "function_call"


def full_name(name: str, namespace: str | None) -> str:
    """A tool's name as the model sees it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def shell_action(arguments: Mapping[str, Any]) -> Json:
    """Return a call of the local shell as OpenAI's clients read it."""
    command = arguments.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else [str(command or "")]
    return {
        "type": "exec",
        "command": words,
        "env": {},
        "timeout_ms": arguments.get("timeout_ms"),
        "user": None,
        "working_directory": arguments.get("working_directory"),
    }
