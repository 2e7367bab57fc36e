"""The chat as a client of an OpenAI-compatible server: what is sent, what comes back, how fast it came."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    OpenAIError,
    Timeout,
)

# Sampling settings that OpenAI's API does not name; they travel as extra fields of the body.
EXTRA_FIELDS = ("top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Model:
    """A model that the server offers."""

    name: str
    context_tokens: int | None  # None: the server does not say


@dataclass(frozen=True)
class Reply:
    """An answer as far as it has come."""

    text: str = ""
    first_token_s: float | None = None  # from sending the request to the first text
    tokens: int | None = None  # told by the server after the last token
    tokens_per_s: float | None = None  # while decoding: the first token's wait is not in it
    finish_reason: str | None = None


def connect(base_url: str, api_key: str | None) -> AsyncOpenAI:
    """Client for the server at base_url (with its `/v1`)."""
    return AsyncOpenAI(
        base_url=base_url,
        api_key=api_key or "none",
        # A refusal is shown at once, and a long prompt may be read for as long as the user has patience.
        max_retries=0,
        timeout=Timeout(None, connect=5.0),
        # The server is this machine or a neighbour: a proxy set for the internet does not lead there.
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


async def first_model(client: AsyncOpenAI) -> Model:
    """The first model in the server's list; ValueError when the list is empty."""
    listed = (await client.models.list()).data
    if not listed:
        raise ValueError("The server offers no model.")
    fields = listed[0].model_extra or {}
    return Model(listed[0].id, fields.get("max_model_len"))


async def stream_reply(
    client: AsyncOpenAI,
    model: str,
    messages: Sequence[Mapping[str, str]],
    settings: Mapping[str, float | None],
) -> AsyncGenerator[Reply, None]:
    """Ask for an answer and yield it again whenever it has grown, last with the server's token count.

    A setting that is None is not sent: the server then follows the model's own recommendation.
    Closing the generator closes the HTTP stream, which is how the server learns of a stop.
    Raises OpenAIError.
    """
    chosen = {name: value for name, value in settings.items() if value is not None}
    extra = {name: chosen.pop(name) for name in EXTRA_FIELDS if name in chosen}
    reply = Reply()
    start_s = time.perf_counter()
    first_s = last_s = start_s
    create: Any = client.chat.completions.create  # its overloads do not know a mapping of settings
    stream = await create(
        model=model,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
        **chosen,
    )
    async with stream:
        async for chunk in stream:
            now_s = time.perf_counter()
            for choice in chunk.choices:
                last_s = now_s
                text = choice.delta.content or ""
                if text and reply.first_token_s is None:
                    first_s = now_s
                    reply = replace(reply, first_token_s=first_s - start_s)
                reply = replace(reply, text=reply.text + text, finish_reason=choice.finish_reason)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
                rate = (tokens - 1) / (last_s - first_s) if tokens > 1 and last_s > first_s else None
                reply = replace(reply, tokens=tokens, tokens_per_s=rate)
            yield reply


def figures(reply: Reply) -> str:
    """One line under an answer: time to first token, speed, length, and why it ended if cut."""
    parts = []
    if reply.first_token_s is not None:
        parts.append(f"first token after {reply.first_token_s:.2f} s")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.1f} tokens/s")
    if reply.tokens is not None:
        parts.append(f"{reply.tokens} token{'s' if reply.tokens != 1 else ''}")
    if reply.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def explain(error: OpenAIError | ValueError, base_url: str) -> str:
    """What went wrong, in a sentence for the person at the page."""
    if isinstance(error, APIConnectionError):
        return f"No connection to the server at {base_url}. Is it running? Start it, then ask again."
    if isinstance(error, APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        # A chat grows with every turn: what its user can do is not what the server advises.
        advice = ". Or start a new chat" if error.code == "context_length_exceeded" else ""
        return f"{body.get('message') or error.message}{advice} (HTTP {error.status_code})"
    if isinstance(error, APIError):
        return f"The server broke off: {error.message}"
    return str(error)
