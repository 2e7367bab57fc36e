"""Chats as the page gets them, in JSON (see `docs/architecture.md` for the events)."""

from dataclasses import asdict
from typing import Any

from neo_desktop.app.chats.blocks import blocks
from neo_desktop.app.chats.messages import Attachment, Chat, ChatEntry, Message, branch, used_tokens

Json = dict[str, Any]


def entry_view(entry: ChatEntry) -> Json:
    """A chat of the list."""
    view: Json = {
        "id": entry.id,
        "title": entry.title,
        "created_s": entry.created_s,
        "updated_s": entry.updated_s,
        "is_streaming": entry.is_streaming,
    }
    return view if entry.snippet is None else view | {"snippet": entry.snippet}


def list_view(entries: list[ChatEntry], notice: str | None) -> Json:
    """The list of chats."""
    return {"chats": [entry_view(entry) for entry in entries], "notice": notice}


def chat_view(chat: Chat, max_tokens: int | None) -> Json:
    """A chat without its messages; `max_tokens`: of the context, None: no model is loaded."""
    return entry_view(chat.entry) | {
        "settings": asdict(chat.settings),
        "leaf_id": chat.leaf_id,
        "context": context_view(chat, max_tokens),
    }


def context_view(chat: Chat, max_tokens: int | None) -> Json | None:
    """How full the context is with the branch that is shown."""
    if max_tokens is None:
        return None
    way = branch({message.id: message for message in chat.messages}, chat.leaf_id)
    return {"used_tokens": used_tokens(way), "max_tokens": max_tokens}


def node_view(message: Message) -> Json:
    """A message with its HTML. It renders: to be called in a thread."""
    return {
        "id": message.id,
        "chat_id": message.chat_id,
        "parent_id": message.parent_id,
        "role": message.role,
        "created_s": message.created_s,
        "text": message.text,
        "thought": message.thought,
        "thought_s": message.thought_s,
        "blocks": list(blocks(message.text)),
        "thought_blocks": list(blocks(message.thought)),
        "state": message.state,
        "error": message.error,
        "figures": None if message.figures is None else asdict(message.figures),
        "attachments": [attachment_view(one) for one in message.attachments],
    }


def whole_view(chat: Chat, max_tokens: int | None) -> Json:
    """A chat with its messages. It renders: to be called in a thread."""
    return chat_view(chat, max_tokens) | {"nodes": [node_view(message) for message in chat.messages]}


def attachment_view(attachment: Attachment) -> Json:
    """An attached file, without its text."""
    return {
        "id": attachment.id,
        "name": attachment.name,
        "kind": attachment.kind,
        "num_chars": len(attachment.text),
    }
