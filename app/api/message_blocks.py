"""The input of Anthropic's clients: messages made of blocks, and tools."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from neo_desktop.app.api.fields import (
    NOT_TEXT,
    Json,
    Model,
    Skipped,
    Tagged,
    TextPart,
    ToolName,
    content,
    given,
)
from neo_desktop.app.api.pictures import ImageBlock
from neo_desktop.app.generate.history import function_call
from neo_desktop.app.generate.images import joined, text_part
from neo_desktop.app.generate.tools import Tool

# Claude Code begins its system prompt with a line that differs in each request: no prefix would be reused.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

_HOSTED = "is left out: this server has no tools of its own"
_OWN_TOOL = "describe it with a name and an input_schema, and without a type"
_NO_RESULT = "is left out: it tells of a tool of another server's"


class ThinkingBlock(Model):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Model):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class ToolReference(Model):
    """A tool that a search for tools has found; all tools are shown to the model from the beginning on."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def part(self) -> Json:
        return text_part(self.tool_name)


class SearchResult(Model):
    """A text that was found, with its source."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextPart]

    @property
    def part(self) -> Json:
        return text_part(
            "\n".join([f"{self.title} ({self.source})", *(block.text for block in self.content)])
        )


_ResultPart = Annotated[TextPart | ToolReference | SearchResult | ImageBlock, Tagged(refused=NOT_TEXT)]
_ResultContent = Annotated[str | list[Any], content(_ResultPart)]


class ToolResultBlock(Model):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _ResultContent = ""
    is_error: bool | None = None

    @property
    def shown(self) -> str | list[Json]:
        """The result as the model reads it."""
        if not self.is_error:
            return self.content
        if isinstance(self.content, str):
            return f"Error: {self.content}"
        return joined([text_part("Error:"), *self.content])


Block = Annotated[
    TextPart | ThinkingBlock | ToolUseBlock | ToolResultBlock | SearchResult | ImageBlock | Skipped,
    Tagged(
        refused={
            **NOT_TEXT,
            "compaction": "this server compacts nothing; send the messages themselves",
            **dict.fromkeys(("tool_addition", "tool_removal", "mcp_tool_listing"), "name all tools in tools"),
        },
        left_out={
            "redacted_thinking": "is left out: only its maker can read it",
            "fallback": "is left out: one model answers here",
            **dict.fromkeys(("server_tool_use", "mcp_tool_use", "mcp_tool_result", "web_*"), _NO_RESULT),
            **dict.fromkeys(("advisor_*", "tool_search_*"), _NO_RESULT),
            **dict.fromkeys(("code_*", "bash_code_*", "text_editor_code_*"), _NO_RESULT),
        },
    ),
]


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]
_SystemBlock = Annotated[TextPart, Tagged(refused=NOT_TEXT)]
System = Annotated[
    list[_SystemBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_SystemBlock])
]


def system_text(blocks: list[TextPart] | None) -> str:
    """The system prompt, without Claude Code's line that changes."""
    texts = (_BILLING_LINE.sub("", block.text) for block in blocks or ())
    return "\n".join(filter(None, texts))


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def for_template(self) -> list[Json]:
        """The message as chat templates expect it: results of tools are messages of their own."""
        results, calls, parts, thoughts = list[Json](), list[Json](), list[Json](), list[str]()
        for block in self.content:
            match block:
                case ToolResultBlock():
                    result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.shown}
                    results.append(result)
                case ToolUseBlock():
                    calls.append(function_call(block.id, block.name, block.input))
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case TextPart() | SearchResult() | ImageBlock():
                    parts.append(block.part)
        fields = {
            "role": self.role,
            "content": joined(parts),
            "tool_calls": calls or None,
            "reasoning_content": "\n".join(thoughts) or None,
        }
        return results + ([given(fields)] if parts or calls or not results else [])


class ToolDefinition(Model):
    name: ToolName
    description: str | None = None
    input_schema: Json  # JSON schema of an object
    type: Literal["custom"] = "custom"
    strict: bool | None = None  # a schema that cannot be enforced in full is refused

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


AnthropicTool = Annotated[
    ToolDefinition | Skipped,
    Tagged(
        refused=dict.fromkeys(("bash_*", "text_editor_*", "computer_*", "memory_*", "browser_*"), _OWN_TOOL),
        left_out=dict.fromkeys(
            ("web_search_*", "web_fetch_*", "code_execution_*", "tool_search_*", "advisor_*", "mcp_toolset"),
            _HOSTED,
        ),
    ),
]
