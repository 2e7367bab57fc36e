"""The input of Anthropic's clients: messages made of blocks, and tools."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from neo_desktop.app.api.fields import (
    HINT,
    NOT_TEXT,
    Joined,
    Json,
    Label,
    Model,
    Only,
    Skipped,
    Tagged,
    Unsupported,
    given,
)
from neo_desktop.app.api.pictures import ImageBlock, check_role
from neo_desktop.app.generate.images import joined, text_part
from neo_desktop.app.generate.tools import Tool

# Claude Code begins its system prompt with a line that differs in each request: no prefix would be reused.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

_HOSTED = "is left out: this server has no tools of its own"
_OWN_TOOL = "describe it with a name and an input_schema, and without a type"
_NO_RESULT = "is left out: it tells of a tool of another server's"


class CacheControl(Model):
    """A mark for the prompt cache; prompts are always kept while they fit."""

    type: str
    ttl: Label = None
    scope: Label = None


class Cached(Model):
    """A part that may carry a mark for the prompt cache."""

    cache_control: Annotated[CacheControl | None, HINT] = None


class TextBlock(Cached):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Json] | None, HINT] = None  # where the assistant found it


class ThinkingBlock(Cached):
    type: Literal["thinking"]
    thinking: str
    signature: Label = None


class ToolUseBlock(Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    caller: Annotated[Any, Only({"type": "direct"})] = None
    toolset_name: Unsupported = None


class ToolReference(Cached):
    """A tool that a search for tools has found; all tools are shown to the model from the beginning on."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The search as the model reads it."""
        return self.tool_name


class SearchResult(Cached):
    """A text that was found, with its source."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Annotated[Json | None, HINT] = None

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        return "\n".join([f"{self.title} ({self.source})", *(block.text for block in self.content)])


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str, Joined(TextBlock, ToolReference, SearchResult)] = ""
    is_error: bool | None = None
    toolset_name: Unsupported = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | SearchResult | ImageBlock | Skipped,
    Tagged(
        *(TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock, SearchResult, ImageBlock),
        refused={
            **NOT_TEXT,
            "compaction": "this server compacts nothing; send the messages themselves",
            "tool_addition": "name all tools in tools",
            "tool_removal": "name all tools in tools",
            "mcp_tool_listing": "name all tools in tools",
        },
        left_out={
            "redacted_thinking": "is left out: only its maker can read it",
            "fallback": "is left out: one model answers here",
            "server_tool_use": _NO_RESULT,
            "mcp_tool_use": _NO_RESULT,
            "mcp_tool_result": _NO_RESULT,
            **{
                f"{name}_tool_result": _NO_RESULT
                for name in (
                    *("web_search", "web_fetch", "code_execution", "bash_code_execution", "advisor"),
                    *("text_editor_code_execution", "tool_search"),
                )
            },
        },
    ),
]
SystemBlock = Annotated[TextBlock, Tagged(TextBlock, refused=NOT_TEXT)]


def as_blocks(content: object) -> object:
    """A text as a list of blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def system_text(blocks: list[TextBlock] | None) -> str:
    """The system prompt, without Claude Code's line that changes."""
    texts = (_BILLING_LINE.sub("", block.text) for block in blocks or ())
    return "\n".join(filter(None, texts))


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: list[Block]
    clear_at: Unsupported = None
    output_config: Unsupported = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[Block])
    @classmethod
    def _as_blocks(cls, content: object) -> object:
        return as_blocks(content)

    @field_validator("content")
    @classmethod
    def _check_images(cls, content: list[Any], info: ValidationInfo) -> list[Any]:
        images = [block for block in content if isinstance(block, ImageBlock)]
        check_role(images or None, info.data.get("role"))
        return content

    def for_template(self) -> list[Json]:
        """The message as chat templates expect it: results of tools are messages of their own."""
        results = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": f"Error: {block.content}" if block.is_error else block.content,
            }
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        parts = [
            block.part if isinstance(block, ImageBlock) else text_part(block.text)
            for block in self.content
            if isinstance(block, TextBlock | SearchResult | ImageBlock)
        ]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        fields = {
            "role": self.role,
            "content": joined(parts),
            "tool_calls": calls or None,
            "reasoning_content": "\n".join(thoughts) or None,
        }
        return results + ([given(fields)] if parts or calls or not results else [])


class ToolDefinition(Cached):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Json  # JSON schema of an object
    type: Literal["custom"] = "custom"
    strict: bool | None = None  # a schema that cannot be enforced in full is refused
    input_examples: list[Json] | None = None
    eager_input_streaming: Annotated[bool | None, HINT] = None  # arguments always come as they are written
    defer_loading: Annotated[bool | None, HINT] = None  # all tools are shown
    allowed_callers: Annotated[Any, Only(["direct"])] = None

    def tool(self) -> Tool:
        """The same for every protocol; models read examples in the description."""
        examples = [
            f"Example of its input: {json.dumps(each, ensure_ascii=False)}"
            for each in self.input_examples or ()
        ]
        description = "\n".join([*given({"": self.description}).values(), *examples])
        return Tool(self.name, description or None, self.input_schema, bool(self.strict))


AnthropicTool = Annotated[
    ToolDefinition | Skipped,
    Tagged(
        ToolDefinition,
        default="custom",
        refused=dict.fromkeys(("bash_*", "text_editor_*", "computer_*", "memory_*", "browser_*"), _OWN_TOOL),
        left_out=dict.fromkeys(
            ("web_search_*", "web_fetch_*", "code_execution_*", "tool_search_*", "advisor_*", "mcp_toolset"),
            _HOSTED,
        ),
    ),
]
