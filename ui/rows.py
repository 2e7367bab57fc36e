"""A chat's shown branch as rows of `gr.Chatbot`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neo_desktop.app.chats.messages import CallState, Message, Round, branch, place_of
from neo_desktop.app.chats.tool_calls import Decision

MAX_VARIANTS = 3  # messages with variants that can be walked, the last ones of the branch
WINDOW = 20  # messages that are shown at first: gr.Chatbot draws every message at each update

Row = dict[str, Any]

# Code is shown unchanged; elsewhere a `<` begins no element, and a picture is a link: none is fetched.
_CODE = re.compile(r"(`{3,}[^`]*(?:`{3,}|\Z)|~{3,}.*?(?:~{3,}|\Z)|`[^`\n]+`)", re.DOTALL)
_CALLS: dict[CallState, str] = {
    "done": "",
    "failed": ": failed",
    "refused": ": refused",
    "open": ": not run",
    "asked": ": not run",
    "running": ": interrupted, it may have run",
}
_DECISIONS: dict[Decision, str] = {
    "allow": "Allow",
    "always": "Allow for this chat",
    "refuse": "Refuse",
}
_ENDED = {"stopped": "Stopped", "cut": "Cut off", "failed": "Failed"}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to draw, and of each the message that it belongs to."""

    rows: list[Row]
    message_ids: list[str]
    num_hidden: int  # earlier messages beyond the window
    is_live: bool


def rows_of(messages: Sequence[Message], leaf_id: str | None, window: int = WINDOW) -> Rows:
    """Return the branch that ends with a message, its newest `window` messages."""
    by_id = {message.id: message for message in messages}
    way = branch(by_id, leaf_id)
    siblings: dict[str | None, list[str]] = {}
    for message in messages:
        siblings.setdefault(message.parent_id, []).append(message.id)
    rows: list[Row] = []
    ids: list[str] = []
    for message in way[-window:]:
        new = _question(message) if message.role == "user" else _answer(message)
        rows += new
        ids += [message.id] * len(new)
    if rows and not way[-1].is_live:
        rows[-1]["options"] = _options(way, siblings)
    elif rows and (asked := _asked(way[-1])):
        rows.append(asked)
        ids.append(way[-1].id)
    return Rows(rows, ids, max(len(way) - window, 0), any(message.is_live for message in way))


def _options(way: Sequence[Message], siblings: dict[str | None, list[str]]) -> list[Row]:
    """Return what can be chosen below the last row, where gr.Chatbot shows them: variants, and Continue."""
    options: list[Row] = []
    for message in [one for one in way if len(siblings[one.parent_id]) > 1][-MAX_VARIANTS:]:
        name = "Question " if message.role == "user" else "Answer " if message is not way[-1] else ""
        options += _variants(name, siblings[message.parent_id], message.id)
    last = way[-1]
    was_cut = last.figures is not None and last.figures.finish_reason == "length"
    if (
        last.role == "assistant"
        and (last.text or last.thought or last.rounds)
        and (was_cut or last.state in _ENDED)
    ):
        options.append({"label": "Continue", "value": f"continue {last.id}"})
    return options


def _question(message: Message) -> list[Row]:
    files = [
        f"Image: {one.name}\n\n"
        if one.kind == "image"
        else f"File: {one.name} ({len(one.text):,} characters)\n\n"
        for one in message.attachments
    ]
    return [{"role": "user", "content": safe("".join(files)) + safe(message.text)}]


def _answer(message: Message) -> list[Row]:
    rows = [row for one in message.rounds for row in _round(one, message.is_live)]
    if message.thought:
        rows.append(_thought(message.thought, message.thought_s, message.is_live and not message.text))
    is_writing = message.is_live and not message.thought and all(map(_is_over, message.rounds[-1:]))
    if message.text or not rows or is_writing:
        rows.append({"role": "assistant", "content": safe(message.text) or ("…" if message.is_live else "")})
    if message.state in _ENDED:
        reason = message.error or ("the server ended" if message.state == "cut" else "")
        shown = f": {safe(reason)}" if reason else ""
        rows.append({"role": "assistant", "content": f"**{_ENDED[message.state]}**{shown}"})
    return rows


def _thought(text: str, thought_s: float | None, is_open: bool) -> Row:
    metadata: Row = {
        "title": "Thinking" if is_open else "Thought",
        "status": "pending" if is_open else "done",
    }
    if thought_s is not None and not is_open:
        metadata["duration"] = round(thought_s, 1)
    return {"role": "assistant", "content": safe(text), "metadata": metadata}


def _round(one: Round, is_live: bool) -> list[Row]:
    rows = [_thought(one.thought, one.thought_s, False)] if one.thought else []
    if one.text.strip():
        rows.append({"role": "assistant", "content": safe(one.text)})
    for call in one.calls:
        is_open = is_live and call.state in ("asked", "running")
        ended = "" if is_live and call.result is None else _CALLS[call.state]
        server = f" of {_word(call.server)}" if call.server else ""
        content = _fenced(_pretty(call.arguments), "json")
        if call.result is not None:
            content += f"\n\n**Result**\n\n{_fenced(call.result)}"
        metadata = {
            "title": f"Tool {_word(call.name)}{server}{ended}",
            "status": "pending" if is_open else "done",
        }
        rows.append({"role": "assistant", "content": content, "metadata": metadata})
    return rows


def _is_over(one: Round) -> bool:
    return all(call.result is not None for call in one.calls)


def _asked(message: Message) -> Row | None:
    """Return the question whether a call may run, with its answers."""
    for number, one in enumerate(message.rounds):
        for place, call in enumerate(one.calls):
            if call.state == "asked":
                where = f"{message.id} {place_of(number, place)}"
                options = [{"label": label, "value": f"{act} {where}"} for act, label in _DECISIONS.items()]
                question = f"May {_word(call.name)} of {_word(call.server)} run with these arguments?"
                return {"role": "assistant", "content": question, "options": options}
    return None


def _word(name: str) -> str:
    """Return a name as one word of code: nothing in it is Markdown."""
    return f"`{' '.join(name.replace('`', '').split())}`"


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _fenced(text: str, language: str = "") -> str:
    """Return a block of code that this text cannot end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _variants(name: str, ids: Sequence[str], shown: str) -> list[Row]:
    """Return "‹ 2/3" and "2/3 ›" as options, which lead to the variants beside the shown one; of two, one."""
    at = ids.index(shown)
    place = f"{name}{at + 1}/{len(ids)}"
    if len(ids) == 2:
        return [{"label": f"‹ {place} ›", "value": f"show {ids[1 - at]}"}]  # noqa: RUF001
    before = {"label": f"‹ {place}", "value": f"show {ids[at - 1]}"}  # noqa: RUF001
    return [before, {"label": f"{place} ›", "value": f"show {ids[(at + 1) % len(ids)]}"}]  # noqa: RUF001


def safe(text: str) -> str:
    """Return Markdown in which HTML outside of code is text, and pictures are links."""
    parts = _CODE.split(text)
    for place in range(0, len(parts), 2):
        parts[place] = parts[place].replace("<", "&lt;").replace("![", "[")
    return "".join(parts)
