"""Rounds of an answer: text, then calls of tools with their results, before the text that ends it."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from neo_desktop.app.generate.history import arguments_of, function_call

# Types of fields, with the bounds that files must keep when they are read in.
Name = Annotated[str, Field(max_length=1000)]
Title = Annotated[str, Field(max_length=10_000)]
Text = Annotated[str, Field(max_length=8_000_000)]
FileText = Annotated[str, Field(max_length=30_000_000)]  # an image takes more than a text
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # in seconds since 1970
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

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
