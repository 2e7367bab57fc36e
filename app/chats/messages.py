"""The parts of a chat.

A chat is a tree of messages: questions and answers take turns on every way down from the root. Another
answer to a question is a sibling of the first (a variant), another wording of a question is a branch.
The page shows the way from the root to one leaf.
"""

import base64
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from neo_desktop.app.generate.history import arguments_of, function_call
from neo_desktop.app.generate.images import image_part, joined, text_part

SHORT_TITLE_CHARS = 60  # of one that is made

# Types of fields, with the bounds that files must keep when they are read in.
Name = Annotated[str, Field(max_length=1000)]
Title = Annotated[str, Field(max_length=10_000)]
Text = Annotated[str, Field(max_length=8_000_000)]
FileText = Annotated[str, Field(max_length=30_000_000)]  # an image takes more than a text
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # in seconds since 1970
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

Role = Literal["user", "assistant"]
State = Literal["done", "waiting", "streaming", "stopped", "cut", "failed"]

Kind = Literal["text", "pdf", "image"]
CallState = Literal["open", "asked", "running", "done", "failed", "refused"]

NOT_RUN = "The tool was not run."
INTERRUPTED = "The call was interrupted: the tool may have run. Ask the user before you repeat it."

MAX_MESSAGES = 20_000  # of a chat
LIVE: tuple[State, ...] = ("waiting", "streaming")  # an answer that is being written


class NotFoundError(LookupError):
    """A chat, a message or a file does not exist; the message names it."""


class NotPossibleError(ValueError):
    """A request that makes no sense for this message; the text says why."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of an answer; None: not known (yet)."""

    first_token_s: Number | None = None  # from the question to the first token
    tokens_per_s: Number | None = None  # while decoding: the wait for the first token is not in it
    output_tokens: Count | None = None
    prompt_tokens: Count | None = None
    finish_reason: Annotated[str, Field(max_length=100)] | None = None
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    id: str
    name: Title
    kind: Kind
    text: FileText = field(repr=False)


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


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat: a question, or an answer as far as it has come."""

    id: str
    chat_id: str
    parent_id: str | None
    role: Role
    created_s: Time
    text: Text = field(repr=False)
    thought: Text = field(default="", repr=False)
    thought_s: Number | None = None  # how long the model thought
    state: State = "done"  # cut: the server ended meanwhile
    error: Text | None = None  # why it failed, for people
    figures: Figures | None = None
    attachments: tuple[Attachment, ...] = ()
    rounds: Annotated[tuple[Round, ...], Field(max_length=1000)] = ()  # before `thought` and `text`

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    def prompt_content(self) -> str | list[dict[str, Any]]:
        """The content for the model: images, files, the question. ValueError: an image is not base64."""
        parts: list[dict[str, Any]] = []
        text = ""
        for one in self.attachments:
            if one.kind == "image":
                parts.append(image_part(base64.b64decode(one.text, validate=True)))
            else:
                text += f"[File: {one.name}]\n{one.text.strip()}\n[End of file]\n\n"
        text += self.text
        return joined([*parts, text_part(text)] if text else parts)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a chat; None: the recommendation of the model's makers."""

    system_prompt: Text | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int64 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    servers: tuple[Name, ...] = ()  # MCP servers whose tools may be called

    def sampling(self) -> dict[str, Any]:
        """The fields of a request, those that are set."""
        others = ("system_prompt", "servers")
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in others}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """A chat as the list shows it."""

    id: str
    title: Title  # empty until the first question
    created_s: Time
    updated_s: Time
    is_streaming: bool = False
    snippet: str | None = None  # of a search: the text around the first hit


@dataclass(frozen=True, slots=True)
class Chat:
    entry: ChatEntry
    settings: Settings
    leaf_id: str | None
    # Parents before children; siblings by age.
    messages: Annotated[tuple[Message, ...], Field(max_length=MAX_MESSAGES)]


def place_of(round_number: int, call_number: int) -> str:
    """Return a word for the place of a call in its answer."""
    return f"{round_number}.{call_number}"


def branch(messages: dict[str, Message], leaf_id: str | None) -> list[Message]:
    way: list[Message] = []
    while leaf_id is not None:
        message = messages[leaf_id]
        way.append(message)
        leaf_id = message.parent_id
    return way[::-1]


def newest_leaf(messages: dict[str, Message], message_id: str) -> str:
    """The end of the way down from a message that takes the newest child each time."""
    newest_child = {message.parent_id: message.id for message in messages.values()}  # later ones win
    while message_id in newest_child:
        message_id = newest_child[message_id]
    return message_id


def used_tokens(way: list[Message]) -> int:
    """Count the tokens of a branch: its last answer's prompt and output; 0 without an answer."""
    for figures in (message.figures for message in reversed(way)):
        if figures is not None and figures.prompt_tokens is not None and figures.output_tokens is not None:
            return figures.prompt_tokens + figures.output_tokens
    return 0


def to_send(way: list[Message], settings: Settings) -> list[dict[str, Any]]:
    """The messages for the chat template of a branch that ends with the question to answer.

    Questions without an answer are left out, since templates want user and assistant to alternate.
    """
    turns: list[dict[str, Any]] = []
    for question, answer in zip(way[:-1:2], way[1::2], strict=False):
        if answer.text:
            turns.append({"role": "user", "content": question.prompt_content()})
            turns += [message for one in answer.rounds for message in one.messages()]
            turns.append({"role": "assistant", "content": answer.text})
    turns.append({"role": "user", "content": way[-1].prompt_content()})
    if settings.system_prompt and settings.system_prompt.strip():
        turns.insert(0, {"role": "system", "content": settings.system_prompt})
    return turns


def make_title(text: str) -> str:
    words = " ".join(text[: 20 * SHORT_TITLE_CHARS].split())
    if len(words) <= SHORT_TITLE_CHARS:
        return words
    cut = words[: SHORT_TITLE_CHARS - 1]
    return (cut.rpartition(" ")[0] or cut) + "…"
