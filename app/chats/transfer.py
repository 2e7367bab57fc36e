"""Chats as files: JSON that can be read in again, and Markdown for people."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from neo_desktop.app.chats.messages import (
    Attachment,
    Chat,
    ChatEntry,
    Figures,
    Kind,
    Message,
    Number,
    Settings,
    Text,
    branch,
)
from neo_desktop.app.chats.rounds import Round
from neo_desktop.app.chats.store import new_id

MAX_CHATS = 20_000
MAX_MESSAGES = 20_000  # of a chat

Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AttachmentPart(_Part):
    name: Annotated[str, Field(max_length=1000)]
    kind: Kind
    text: Annotated[str, Field(max_length=30_000_000)]  # an image takes more than a text


_SAME = (
    "role",
    "created_s",
    "text",
    "thought",
    "thought_s",
    "state",
    "error",
    "rounds",
    "figures",
)  # in `Message`


class MessagePart(_Part):
    """`Message`; its parent is an earlier message of the list."""

    parent: Annotated[int, Field(ge=0)] | None
    role: Literal["user", "assistant"]
    created_s: Time
    text: Text
    thought: Text = ""
    thought_s: Number | None = None
    state: Literal["done", "stopped", "cut", "failed"] = "done"
    error: Annotated[str, Field(max_length=100_000)] | None = None
    figures: Figures | None = None
    rounds: Annotated[tuple[Round, ...], Field(max_length=1000)] = ()
    attachments: Annotated[list[AttachmentPart], Field(max_length=100)] = []

    @classmethod
    def of(cls, message: Message, parent: int | None) -> Self:
        """Write a message down; one that is being written counts as cut."""
        same: dict[str, Any] = {name: getattr(message, name) for name in _SAME}
        if message.is_live:
            same["state"] = "cut"
        files = [AttachmentPart(name=one.name, kind=one.kind, text=one.text) for one in message.attachments]
        return cls(parent=parent, attachments=files, **same)


class ChatPart(_Part):
    """`Chat`; `leaf` is a place in the list of messages."""

    title: Annotated[str, Field(max_length=10_000)]
    created_s: Time
    updated_s: Time
    settings: Settings = Settings()
    leaf: Annotated[int, Field(ge=0)] | None = None
    messages: Annotated[list[MessagePart], Field(max_length=MAX_MESSAGES)]

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        for place, message in enumerate(self.messages):
            if message.parent is None:
                follows = "assistant"
            elif message.parent >= place:
                raise PydanticCustomError("tree", "has a message whose parent does not come before it")
            else:
                follows = self.messages[message.parent].role
            if follows == message.role:
                raise PydanticCustomError(
                    "tree", "has a question that follows a question, or no answer to one"
                )
        if self.leaf is not None and self.leaf >= len(self.messages):
            raise PydanticCustomError("tree", "has a leaf that is none of its messages")
        return self

    @classmethod
    def of(cls, chat: Chat) -> Self:
        """Write every branch and variant down."""
        places: dict[str | None, int] = {message.id: place for place, message in enumerate(chat.messages)}
        messages = [MessagePart.of(message, places.get(message.parent_id)) for message in chat.messages]
        entry, leaf = chat.entry, places.get(chat.leaf_id)
        return cls(
            title=entry.title,
            created_s=entry.created_s,
            updated_s=entry.updated_s,
            settings=chat.settings,
            leaf=leaf,
            messages=messages,
        )

    def chat(self) -> Chat:
        chat_id = new_id()
        ids = [new_id() for _ in self.messages]
        messages = tuple(
            Message(
                id=message_id,
                chat_id=chat_id,
                parent_id=None if part.parent is None else ids[part.parent],
                attachments=tuple(
                    Attachment(new_id(), one.name, one.kind, one.text) for one in part.attachments
                ),
                **{name: getattr(part, name) for name in _SAME},
            )
            for message_id, part in zip(ids, self.messages, strict=True)
        )
        entry = ChatEntry(chat_id, self.title, self.created_s, self.updated_s, is_streaming=False)
        # A file switches no servers on.
        settings = replace(self.settings, servers=())
        return Chat(entry, settings, None if self.leaf is None else ids[self.leaf], messages)


class ChatsFile(_Part):
    format: Literal["neo-desktop chats"]
    version: Literal[1]
    chats: Annotated[list[ChatPart], Field(max_length=MAX_CHATS)]


def from_json(body: bytes) -> list[Chat]:
    """Return chats as `to_json` wrote them, with new ids; ValidationError: the file is another one."""
    return [part.chat() for part in ChatsFile.model_validate_json(body).chats]


def to_json(chats: list[Chat]) -> str:
    parts = [ChatPart.of(chat) for chat in chats]
    return ChatsFile(format="neo-desktop chats", version=1, chats=parts).model_dump_json(indent=1)


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
