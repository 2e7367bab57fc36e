"""Chats as files: JSON that can be read in again, and Markdown for people."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from neo_desktop.app.chats.messages import LIVE, Chat, Message, branch
from neo_desktop.app.chats.store import new_id

MAX_CHATS = 20_000


def _checked(chat: Chat) -> Chat:
    """Check that messages form a tree in which questions and answers take turns."""
    roles: dict[str | None, str] = {None: "assistant"}
    for message in chat.messages:
        if message.state in LIVE:
            raise PydanticCustomError("tree", "has an answer in the state of being written")
        if message.id in roles or message.parent_id not in roles:
            raise PydanticCustomError("tree", "has a message whose parent does not come before it")
        if roles[message.parent_id] == message.role:
            raise PydanticCustomError("tree", "has a question that follows a question, or no answer to one")
        roles[message.id] = message.role
    if chat.leaf_id not in roles:
        raise PydanticCustomError("tree", "has a leaf that is none of its messages")
    return chat


class ChatsFile(BaseModel):
    """Chats with every branch and variant; their ids are of this file alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["neo-desktop chats"]
    version: Literal[1]
    chats: Annotated[list[Annotated[Chat, AfterValidator(_checked)]], Field(max_length=MAX_CHATS)]


def from_json(body: bytes) -> list[Chat]:
    """Return chats as `to_json` wrote them, with new ids; ValidationError: the file is another one."""
    ids = iter(new_id, None)
    return [_renamed(chat, ids) for chat in ChatsFile.model_validate_json(body).chats]


def to_json(chats: list[Chat]) -> str:
    """Write chats down; an answer that is being written counts as cut."""
    parts = [_renamed(chat, map(str, itertools.count())) for chat in chats]
    return ChatsFile(format="neo-desktop chats", version=1, chats=parts).model_dump_json(indent=1)


def _renamed(chat: Chat, ids: Iterator[str]) -> Chat:
    """Return a chat at rest, with other ids for it, its messages and their files."""
    chat_id = next(ids)
    named: dict[str | None, str | None] = {None: None}

    def renamed(message: Message) -> Message:
        named[message.id] = message_id = next(ids)
        return replace(
            message,
            id=message_id,
            chat_id=chat_id,
            parent_id=named[message.parent_id],
            state="cut" if message.is_live else message.state,
            attachments=tuple(replace(file, id=next(ids)) for file in message.attachments),
        )

    messages = tuple(map(renamed, chat.messages))
    entry = replace(chat.entry, id=chat_id, is_streaming=False)
    settings = replace(chat.settings, servers=())  # a file switches no server on
    return Chat(entry, settings, named[chat.leaf_id], messages)


def to_markdown(chat: Chat) -> str:
    parts = [f"# {chat.entry.title or 'Chat'}"]
    if chat.settings.system_prompt:
        parts.append(f"**System prompt**\n\n{chat.settings.system_prompt.strip()}")
    for message in branch({one.id: one for one in chat.messages}, chat.leaf_id):
        model = message.figures.model if message.figures else None
        parts.append(
            "## Question" if message.role == "user" else f"## Answer{f' ({model})' if model else ''}"
        )
        parts += [f"*Attached: {one.name}*" for one in message.attachments]
        for one in message.rounds:
            parts += [_quoted(one.thought), one.text.strip()]
            for call in one.calls:
                result = _quoted(call.result or f"({call.state})")
                parts.append(f"*Tool: {call.name} {call.arguments}*\n\n{result}")
        parts += [_quoted(message.thought), message.text.strip()]
        if message.error:
            parts.append(f"*{message.error}*")
    return "\n\n".join(part for part in parts if part) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
