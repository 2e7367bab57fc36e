"""A chat's shown branch as rows of `gr.Chatbot`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neo_desktop.app.chats.messages import Attachment, Message, branch

WINDOW = 40  # messages that are shown at first: gr.Chatbot draws all of them at each update

Row = dict[str, Any]

# Code is shown as it is; elsewhere a `<` begins no element, and a picture is a link: none is fetched.
_CODE = re.compile(r"(`{3,}[^`]*(?:`{3,}|\Z)|~{3,}.*?(?:~{3,}|\Z)|`[^`\n]+`)", re.DOTALL)
_ENDED = {
    "stopped": "Stopped",
    "cut": "Cut off: the server ended",
    "failed": "Failed",
}


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
        options = _variants(siblings[message.parent_id], message.id)
        if message.role == "assistant" and not message.is_live and (message.text or message.thought):
            if message is way[-1] and _is_unfinished(message):
                options.append({"label": "Continue", "value": f"continue {message.id}"})
        new[-1]["options"] = options
        rows += new
        ids += [message.id] * len(new)
    return Rows(rows, ids, max(len(way) - window, 0), any(message.is_live for message in way))


def _question(message: Message) -> list[Row]:
    files = "".join(f"📎 {safe(_file(one))}\n\n" for one in message.attachments)
    return [{"role": "user", "content": files + safe(message.text)}]


def _answer(message: Message) -> list[Row]:
    rows: list[Row] = []
    if message.thought:
        is_open = message.is_live and not message.text
        metadata: Row = {
            "title": "Thinking" if is_open else "Thought",
            "status": "pending" if is_open else "done",
        }
        if message.thought_s is not None and not is_open:
            metadata["duration"] = round(message.thought_s, 1)
        rows.append({"role": "assistant", "content": safe(message.thought), "metadata": metadata})
    if message.text or not rows:
        rows.append({"role": "assistant", "content": safe(message.text) or ("…" if message.is_live else "")})
    if message.state in _ENDED:
        metadata = {"title": _ENDED[message.state], "status": "done"}
        rows.append({"role": "assistant", "content": safe(message.error or ""), "metadata": metadata})
    return rows


def _is_unfinished(message: Message) -> bool:
    was_cut = message.figures is not None and message.figures.finish_reason == "length"
    return was_cut or message.state in _ENDED


def _variants(ids: Sequence[str], shown: str) -> list[Row]:
    """Return "‹ 2/3 ›" as options; none where there is one variant alone."""
    if len(ids) < 2:
        return []
    at = ids.index(shown)
    options = [{"label": f"‹ {at + 1}/{len(ids)}", "value": f"show {ids[at - 1]}"}]
    return [*options, {"label": f"{at + 1}/{len(ids)} ›", "value": f"show {ids[(at + 1) % len(ids)]}"}]


def _file(attachment: Attachment) -> str:
    return f"{attachment.name} ({len(attachment.text):,} characters)"


def safe(text: str) -> str:
    """Return Markdown in which HTML outside of code is text, and pictures are links."""
    parts = _CODE.split(text)
    for place in range(0, len(parts), 2):
        parts[place] = parts[place].replace("<", "&lt;").replace("![", "[")
    return "".join(parts)
