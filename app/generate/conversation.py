"""A chat of any protocol on its way to the model.

    messages, tools, settings ──template──→ prompt ──engine──→ text ──→ thoughts, answer, tool calls

The protocols (`chat`, `responses`, `messages`) are only shapes around this; `outputs` is the way back.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError, blaming
from neo_desktop.app.generate.calls import short_id
from neo_desktop.app.generate.history import explained, paired, with_thinking
from neo_desktop.app.generate.images import check_images, put_back, taken_out
from neo_desktop.app.generate.structure import Structure, enforcing
from neo_desktop.app.generate.tools import AUTO, Tool, ToolChoice, ToolFormat, format_of
from neo_desktop.engine import grammar
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.json_schema import Json
from neo_desktop.models import harmony
from neo_desktop.models.marks import ChatText, Shield
from neo_desktop.models.thoughts import CLOSING, OPENING, is_open
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.vision.prompt import with_images

EFFORT_TOKENS = {"minimal": 512, "low": 2048, "medium": 8192}  # of thoughts; more effort has no limit.


class Begun(NamedTuple):
    """The beginning of an answer that an earlier run wrote."""

    thought: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of the model."""

    messages: Sequence[Json]  # as chat templates expect them, at least one; content may be parts (`images`)
    tools: Sequence[Tool] = ()  # that may be called
    choice: ToolChoice | None = AUTO  # None: no tool is to be called
    is_parallel: bool = True  # several calls may come in one answer
    template_fields: Mapping[str, Any] = field(default_factory=dict)  # like {"enable_thinking": False}
    structure: Structure | None = None  # the form of the answer
    continues_last: bool = False  # continue the last message rather than answer it
    thought_tokens: int | None = None  # limit on tokens of thoughts; None: no limit
    begun: Begun | None = None  # the answer so far; the model writes the rest
    field: str = "messages"  # of the body, that holds the messages


class Prepared(NamedTuple):
    """A conversation as the model sees it."""

    prompt: ChatText
    tool_format: ToolFormat
    tools: Sequence[Tool]  # those that may be called
    is_thinking: bool  # the template has begun a thought
    begun: str  # the model's text after the prompt
    is_calling: bool  # the prompt has begun a call, which must come
    is_parallel: bool
    grammar: str | None
    grammar_after: str | None  # text that precedes the grammar's


async def prepare(service: EngineService, conversation: Conversation) -> Prepared:
    """Write a conversation as its model's template does it."""
    with blaming(conversation.field):
        service.templates.check_count(conversation.messages)  # before any work per message
    if conversation.continues_last:
        _check_continued(conversation)
    texts, images, sign = taken_out(conversation.messages)
    check_images(service, conversation.messages, images, conversation.field)
    conversation = replace(conversation, messages=texts)
    choice = conversation.choice
    tools = _callable_tools(conversation)
    tool_format = format_of(service.tokenizer.chat_template_for(has_tools=bool(tools)))
    shield, tools_shown = _shielded(service.tokenizer, conversation, tools)
    messages = paired(shield.messages(conversation.messages), single_calls=tool_format.single_calls)
    if tool_format.short_ids:
        messages = [_with_short_ids(message) for message in messages]
    if tool_format.on_channels:
        messages = with_thinking(messages)
    if not tool_format.in_template:
        messages = explained(messages, tools_shown)
    fields = shield.broken(conversation.template_fields)
    shown = [tool.for_template() for tool in tools_shown] if tool_format.in_template else []
    fields["tools"] = shown or None
    if conversation.continues_last:
        fields["add_generation_prompt"] = False
    with blaming(conversation.field):
        prompt = await service.templates.render(
            put_back(messages, sign), fields, shield, is_continued=conversation.continues_last
        )
    is_thinking = is_open(str(prompt), messages[-1]["content"] if conversation.continues_last else "")
    begun = ""
    if conversation.begun is not None:
        begun = as_written(conversation.begun, is_thinking, on_channels=tool_format.on_channels)
        if tool_format.on_channels:
            prompt += _on_channels(conversation.begun)
        else:
            prompt += service.tokenizer.marks.split(begun, is_spoken=True)
    must_call = choice is not None and choice.is_required
    is_calling = must_call and not is_thinking and not tool_format.on_channels
    if is_calling:
        prompt += service.tokenizer.marks.split(tool_format.prompt_end())
    with enforcing(conversation.structure.field if conversation.structure else "tools"):
        # In a thread: schemas may be long.
        lark, after = await asyncio.to_thread(
            _grammar, service.tokenizer, conversation, tool_format, tools, is_thinking
        )
    with blaming(conversation.field):
        rows = [await service.see(image) for image in images]
        prompt = with_images(prompt, rows) if images else prompt
    is_parallel = conversation.is_parallel
    return Prepared(prompt, tool_format, tools, is_thinking, begun, is_calling, is_parallel, lark, after)


def as_written(begun: Begun, is_thinking: bool, *, on_channels: bool = False) -> str:
    """Return the text of a model that reads as this thought and answer.

    The prompt may end within a thought; on channels, a thought ends even if no text follows.
    """
    thought, text = begun
    if not thought:
        return f"{CLOSING}\n\n{text}" if is_thinking and text else text
    opening = "" if is_thinking else f"{OPENING}\n"
    closing = f"{CLOSING}\n\n" if text or on_channels else ""
    return f"{opening}{thought}{closing}{text}"


def _on_channels(begun: Begun) -> ChatText:
    written = ChatText(("",))
    if begun.thought:
        thought = ("", harmony.CHANNEL, "analysis", harmony.MESSAGE, begun.thought, harmony.END, "")
        written += ChatText((*thought, harmony.START, "assistant"))
    if begun.text:
        written += ChatText(("", harmony.CHANNEL, "final", harmony.MESSAGE, begun.text))
    return written


def thinking_fields(
    template: str | None, effort: str | None, is_on: bool | None = None, *, is_hint: bool = False
) -> Json:
    """Return the template's fields about thoughts; None: the model's default.

    Agents always send an effort as a hint, of which a template without levels takes no notice.
    """
    template = template or ""
    if effort is not None and is_on is None and "enable_thinking" in template:
        is_on = effort != "none"
    fields: Json = {}
    if is_on is not None and "enable_thinking" in template:
        fields["enable_thinking"] = is_on
    if effort is not None and "reasoning_effort" in template:
        fields["reasoning_effort"] = effort
    if effort not in (None, "none", "medium") and not fields and not is_hint:
        raise SettingError("reasoning_effort", "is not something that this model knows; leave it out")
    return fields


def thought_tokens(template: str | None, effort: str | None, budget: int | None) -> int | None:
    """Return the limit on tokens of thoughts: a budget, or a level that the template lacks."""
    if budget is not None or "reasoning_effort" in (template or ""):
        return budget
    return EFFORT_TOKENS.get(effort or "")


def _callable_tools(conversation: Conversation) -> Sequence[Tool]:
    choice = conversation.choice
    if choice is None:
        return ()
    if choice.is_required and not conversation.tools:
        raise SettingError("tool_choice", "asks for a call, but there are no tools")
    if choice.name is None:
        return conversation.tools
    named = [tool for tool in conversation.tools if tool.name == choice.name]
    if not named:
        raise SettingError("tool_choice", f"names {choice.name!r}, which is not among the tools")
    return named


def _grammar(
    tokenizer: Tokenizer,
    conversation: Conversation,
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    is_thinking: bool,
) -> tuple[str | None, str | None]:
    """Return the answer's grammar, or None; and the text before it, None: it holds from the beginning."""
    structure, on_channels = conversation.structure, tool_format.on_channels
    must_call = conversation.choice is not None and conversation.choice.is_required
    after = CLOSING if is_thinking else None
    if not must_call and structure is None:
        return None, None
    if not must_call and structure is not None and not tools:
        return structure.grammar(), f"{harmony.CHANNEL}final{harmony.MESSAGE}" if on_channels else after
    mark = _in_lark(tokenizer, harmony.MESSAGE if on_channels else "[ARGS]")
    is_parallel = conversation.is_parallel and not on_channels
    rules = tool_format.grammar(tools, is_parallel=is_parallel, arguments_mark=mark)
    if not must_call and structure is not None:
        rules += f"\nanswer: %json {structure.schema()}"
    if on_channels:  # the model thinks in a message of its own, and writes headers
        header = f'{_in_lark(tokenizer, harmony.START)} "assistant" {_in_lark(tokenizer, harmony.CHANNEL)}'
        calls = f"{json.dumps(f'commentary {harmony.TO_FUNCTION}')} calls"
        start = f"{header} {calls}" if must_call else f'{header} ({calls} | "final" {mark} answer)'
        after = harmony.END
    elif must_call:
        start = f'/\\s*/ {_in_lark(tokenizer, tool_format.opening)} "\\n" calls' if is_thinking else "calls"
    else:
        opening = "" if tool_format.is_bare else _in_lark(tokenizer, tool_format.opening)
        line_break = '"\\n"' if tool_format.closing else ""
        start = f"answer | {opening} {line_break} calls"
    return grammar.from_lark(f"start: {start}\n{rules}"), after


def _in_lark(tokenizer: Tokenizer, mark: str) -> str:
    """A mark as Lark names it: by its id where it is a special token."""
    token_id = special_id(tokenizer, mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"


def special_id(tokenizer: Tokenizer, mark: str) -> int | None:
    """The token that a mark is, where it gives no text of its own."""
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    is_special = len(token_ids) == 1 and tokenizer.text_alone(token_ids[0]) is None
    return token_ids[0] if is_special else None


def _with_short_ids(message: Json) -> Json:
    result = dict(message)
    if "tool_call_id" in message:
        result["tool_call_id"] = short_id(message["tool_call_id"])
    if "tool_calls" in message:
        result["tool_calls"] = [call | {"id": short_id(call["id"])} for call in message["tool_calls"]]
    return result


def _shielded(
    tokenizer: Tokenizer, conversation: Conversation, tools: Sequence[Tool]
) -> tuple[Shield, list[Tool]]:
    """Return a shield for a conversation's marks, and the tools without marks."""
    definitions = [(tool.name, tool.description, tool.parameters) for tool in tools]
    with blaming(conversation.field):
        shield = Shield(tokenizer.marks, conversation.messages, definitions, conversation.template_fields)
    return shield, [
        replace(Tool(*shield.broken(definition)), is_strict=tool.is_strict)
        for tool, definition in zip(tools, definitions, strict=True)
    ]


def _check_continued(conversation: Conversation) -> None:
    """Raise ApiError if the last message is not text that can be continued."""
    last = conversation.messages[-1]
    reasons = {
        "it ends with a tool call": last.get("tool_calls"),
        "it holds a thought and no text": last.get("reasoning_content") and not last.get("content"),
        "it has images": isinstance(last.get("content"), list),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        message = f"the last message cannot be continued: {reason}; add text or another message"
        raise ApiError(400, message, param=conversation.field)
