"""Rounds of an answer: text, then calls of tools with their results, before the text that ends it."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from neo_desktop.app.chats.bounds import Name, Number, Text
from neo_desktop.app.generate.history import arguments_of, function_call

CallState = Literal["open", "asked", "running", "done", "failed", "refused"]

NOT_RUN = "The tool was not run."
INTERRUPTED = "The call was interrupted: the tool may have run. Ask the user before you repeat it."


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    "asked": it waits for the user's permission; "running" in an answer at rest: it was interrupted.
    """

    id: Name
    name: Name  # in the model's words
    arguments: Text = field(repr=False)  # JSON
    server: Name = ""  # empty: no server has this tool
    result: Text | None = field(default=None, repr=False)  # None: it has not ended
    state: CallState = "open"

    @property
    def told(self) -> str:
        """The result as the model reads it."""
        if self.result is not None:
            return self.result
        return INTERRUPTED if self.state == "running" else NOT_RUN


@dataclass(frozen=True, slots=True)
class Round:
    """A text of the model that ends with calls, and the calls."""

    calls: Annotated[tuple[ToolCall, ...], Field(max_length=1000)]
    text: Text = field(default="", repr=False)
    thought: Text = field(default="", repr=False)
    thought_s: Number | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Return the round as chat templates expect it: a message with calls, and one per result."""
        calls = [function_call(call.id, call.name, arguments_of(call.arguments)) for call in self.calls]
        said = {"role": "assistant", "content": self.text.strip(), "tool_calls": calls}
        if self.thought:
            said["reasoning_content"] = self.thought
        results = [{"role": "tool", "tool_call_id": call.id, "content": call.told} for call in self.calls]
        return [said, *results]


def place_of(round_number: int, call_number: int) -> str:
    """Return a word for the place of a call in its answer."""
    return f"{round_number}.{call_number}"
