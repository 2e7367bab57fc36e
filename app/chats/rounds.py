"""Rounds of an answer: text, then calls of tools with their results, before the text that ends it."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from neo_desktop.app.generate.history import arguments_of, function_call

CallState = Literal["open", "asked", "running", "done", "failed", "refused"]

NOT_RUN = "The tool was not run."
INTERRUPTED = "The call was interrupted: the tool may have run. Ask the user before you repeat it."

_Text = Annotated[str, Field(max_length=8_000_000)]
_Name = Annotated[str, Field(max_length=1000)]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    "asked": it waits for the user's permission; "running" in an answer at rest: it was interrupted.
    """

    id: _Name
    name: _Name  # in the model's words
    arguments: _Text = field(repr=False)  # JSON
    server: _Name = ""  # empty: no server has this tool
    result: _Text | None = field(default=None, repr=False)  # None: it has not ended
    state: CallState = "open"

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

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
    text: _Text = field(default="", repr=False)
    thought: _Text = field(default="", repr=False)
    thought_s: Annotated[float, Field(allow_inf_nan=False)] | None = None

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    def messages(self) -> list[dict[str, Any]]:
        """Return the round as chat templates expect it: a message with calls, and one per result."""
        calls = [function_call(call.id, call.name, arguments_of(call.arguments)) for call in self.calls]
        said = {"role": "assistant", "content": self.text.strip(), "tool_calls": calls}
        if self.thought:
            said["reasoning_content"] = self.thought
        results = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": call.told,
            }
            for call in self.calls
        ]
        return [said, *results]


def place_of(round_number: int, call_number: int) -> str:
    """Return a word for the place of a call in its answer."""
    return f"{round_number}.{call_number}"


def rounds_of(text: str | None) -> tuple[Round, ...]:
    """Return the rounds that JSON text holds."""
    return tuple(
        Round(**{**one, "calls": tuple(ToolCall(**call) for call in one["calls"])})
        for one in json.loads(text or "[]")
    )
