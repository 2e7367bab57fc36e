"""The items of a response's conversation: messages, thoughts, calls and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from neo_desktop.app.api.fields import (
    HINT,
    NOT_TEXT,
    Content,
    Json,
    Label,
    LeftOut,
    Model,
    Only,
    Skipped,
    Tagged,
)
from neo_desktop.app.api.pictures import ContentWithImages, check_role
from neo_desktop.app.api.response_tools import LOCAL_SHELL, full_name
from neo_desktop.app.generate.history import arguments_of

Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, HINT]
_NO_RESULT = "is left out: it tells of a tool of another server's"


class MessageItem(Model):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ContentWithImages
    id: Label = None
    status: Status = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, HINT] = None

    @field_validator("content")
    @classmethod
    def _check_images(cls, content: str | list[Any], info: ValidationInfo) -> str | list[Any]:
        check_role(content, info.data.get("role"))
        return content


class ReasoningText(Model):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_Thoughts = list[Annotated[ReasoningText, Tagged(ReasoningText)]]


class ReasoningItem(Model):
    type: Literal["reasoning"]
    id: Label = None
    summary: _Thoughts | None = None
    content: _Thoughts | None = None
    encrypted_content: Annotated[
        str | None, LeftOut("encrypted thoughts are left out: only their maker can read them", "")
    ] = None
    status: Status = None


class CallItem(Model):
    """The common fields of calls and their results."""

    call_id: str
    id: Label = None
    status: Status = None
    caller: Annotated[Any, Only({"type": "direct"})] = None


class NamedCallItem(CallItem):
    """A call of a tool with a name."""

    name: str
    namespace: str | None = None
    # `async` is a word of Python's.
    async_: Annotated[Any, Only(False)] = Field(default=None, alias="async")


class FunctionCallItem(NamedCallItem):
    type: Literal["function_call"]
    arguments: str  # JSON

    def called(self) -> tuple[str, Any]:
        """Return the tool's name, as the model sees it, and the arguments."""
        return full_name(self.name, self.namespace), arguments_of(self.arguments)


class CustomCallItem(NamedCallItem):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    input: str

    def called(self) -> tuple[str, Any]:
        """Return the tool's name, as the model sees it, and the arguments."""
        return full_name(self.name, self.namespace), {"input": self.input}


class ShellAction(Model):
    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(CallItem):
    """A command that the model had run."""

    type: Literal["local_shell_call"]
    action: ShellAction

    def called(self) -> tuple[str, Any]:
        """Return the tool's name, as the model sees it, and the arguments."""
        action = self.action.model_dump(exclude_none=True, exclude={"type"})
        return LOCAL_SHELL, {name: value for name, value in action.items() if value != {}}


class OutputItem(CallItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Content
    name: Annotated[str | None, HINT] = None
    namespace: Annotated[str | None, HINT] = None


class ShellOutputItem(Model):
    """The result of a command; OpenAI names the call's id `id`."""

    type: Literal["local_shell_call_output"]
    output: Content
    id: str | None = None
    call_id: str | None = None
    status: Status = None


class ItemReference(Model):
    type: Literal["item_reference"]
    id: str


CallItems = FunctionCallItem | CustomCallItem | LocalShellCallItem


def _with_type(item: object) -> object:
    """Messages and references may leave their type out."""
    if not isinstance(item, dict) or item.get("type"):
        return item
    if "role" in item:
        return item | {"type": "message"}
    return item | {"type": "item_reference"} if item.keys() <= {"id", "type"} else item


Item = Annotated[
    Annotated[
        MessageItem | ReasoningItem | CallItems | OutputItem | ShellOutputItem | ItemReference | Skipped,
        Tagged(
            *(MessageItem, ReasoningItem, FunctionCallItem, CustomCallItem, LocalShellCallItem),
            *(OutputItem, ShellOutputItem, ItemReference),
            refused={
                **NOT_TEXT,
                "compaction": "only its maker can read it; send the messages themselves",
                "compaction_trigger": "this server compacts nothing; leave it out",
                "additional_tools": "name all tools in tools",
                "configuration_update": "send the settings of this request in its own fields",
            },
            left_out=dict.fromkeys(
                [
                    *(
                        "web_search_call",
                        "file_search_call",
                        "code_interpreter_call",
                        "image_generation_call",
                    ),
                    *("computer_call", "computer_call_output", "mcp_*", "tool_search_*", "program"),
                    *("program_output", "shell_call", "shell_call_output", "apply_patch_*"),
                ],
                _NO_RESULT,
            ),
        ),
    ],
    BeforeValidator(_with_type),
]


def for_template(items: Sequence[Any]) -> list[Json]:
    """The items as chat templates expect them: thoughts and calls are part of the assistant's message."""
    messages: list[Json] = []
    thought = ""
    is_assistants = False  # the last message is the assistant's, and this item belongs to it
    for item in items:
        if isinstance(item, Skipped):
            continue
        if isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or item.summary or ())
            is_assistants = False
            continue
        if isinstance(item, OutputItem | ShellOutputItem):
            call_id = item.call_id or item.id or ""
            messages.append({"role": "tool", "tool_call_id": call_id, "content": item.output})
        elif isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
        else:
            if not is_assistants:
                messages.append({"role": "assistant", "content": ""})
            name, arguments = item.called()
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            messages[-1].setdefault("tool_calls", []).append(call)
        is_assistants = messages[-1]["role"] == "assistant"
        if is_assistants and thought:
            messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages
