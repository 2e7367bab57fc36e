"""The bodies that go back to OpenAI's clients."""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from neo_desktop.app.errors import from_service
from neo_desktop.app.service import Generation, ServiceError
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.engine.request import RequestOutput
from neo_desktop.models.tokenizer import Tokenizer

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between the two endpoints."""

    with_logprobs: bool
    id_prefix: str
    object: str  # of an answer in one piece
    chunk_object: str  # of a part of a stream

    def opening(self, index: int) -> Json | None:
        """The choice with which each output of a stream begins, if any."""
        ...

    def whole(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """One choice of an answer in one piece."""
        ...

    def part(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """One choice of a part of a stream."""
        ...


class ChatShape:
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self.with_logprobs = with_logprobs

    def opening(self, index: int) -> Json:
        """The message begins: whose it is."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """One message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": end}

    def part(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """More of a message, or its end."""
        delta = {"content": text} if end is None else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": end}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not self.with_logprobs or not tokens:
            return None
        content = [
            self._entry(token.logprob) | {"top_logprobs": [self._entry(top) for top in token.top_logprobs]}
            for token in tokens
            if token.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: TokenLogprob) -> Json:
        text = self._tokenizer.token_text(token.token_id)
        token_bytes = list(self._tokenizer.token_bytes(token.token_id))
        return {"token": text, "logprob": _finite(token.logprob), "bytes": token_bytes}


class CompletionShape:
    """POST /v1/completions."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self.with_logprobs = with_logprobs
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # index -> where its next token begins

    def opening(self, index: int) -> None:
        """Nothing comes before the text."""

    def whole(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """One text."""
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": end,
        }

    part = whole

    def _logprobs(self, index: int, tokens: Sequence[SampledToken]) -> Json | None:
        if not self.with_logprobs or not tokens:
            return None
        text_of = self._tokenizer.token_text
        body: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if token.logprob is None:
                continue
            text = text_of(token.token_id)
            likely = (token.logprob, *token.top_logprobs)  # as with OpenAI, the chosen one is always there
            body["tokens"].append(text)
            body["token_logprobs"].append(_finite(token.logprob.logprob))
            body["top_logprobs"].append({text_of(one.token_id): _finite(one.logprob) for one in likely})
            body["text_offset"].append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return body


class Usage:
    """Counts tokens over all outputs of a request."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}
        self._cached_tokens: dict[str, int] = {}
        self._output_tokens: dict[int, int] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        """Take in an output; its counts are totals."""
        self._prompt_tokens[output.request_id] = output.num_prompt_tokens
        self._cached_tokens[output.request_id] = output.num_cached_tokens
        self._output_tokens[index] = output.num_output_tokens

    def body(self) -> Json:
        """The usage object; a prompt counts once, however many outputs it has."""
        num_prompt, num_output = sum(self._prompt_tokens.values()), sum(self._output_tokens.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }


async def whole_answer(generation: Generation, shape: Shape, model: str) -> Json:
    """Wait for all outputs.

    Raises:
        ServiceError: they will not come.
    """
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[SampledToken]] = defaultdict(list)
    ends: dict[int, str] = {}
    usage = Usage()
    async with generation:
        async for index, output in generation:
            texts[index] += output.text
            tokens[index] += output.tokens
            usage.add(index, output)
            if output.finish_reason is not None:
                ends[index] = output.finish_reason
    choices = [shape.whole(index, texts[index], tokens[index], ends[index]) for index in sorted(ends)]
    return _head(shape, shape.object, model) | {"choices": choices, "usage": usage.body()}


async def events(
    generation: Generation, shape: Shape, model: str, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the outputs as server-sent events, while they grow; an error is the last event but `[DONE]`."""
    head = _head(shape, shape.chunk_object, model)
    head |= {"usage": None} if include_usage else {}
    usage = Usage()
    begun: set[int] = set()
    try:
        async for index, output in generation:
            usage.add(index, output)
            if index not in begun:
                begun.add(index)
                opening = shape.opening(index)
                if opening is not None:
                    yield _event(head | {"choices": [opening]})
            if output.text or (output.tokens and shape.with_logprobs):
                part = shape.part(index, output.text, output.tokens, None)
                yield _event(head | {"choices": [part]})
            if output.finish_reason is not None:
                last = shape.part(index, "", (), output.finish_reason)
                yield _event(head | {"choices": [last]})
        if include_usage:
            yield _event(head | {"choices": [], "usage": usage.body()})
    except ServiceError as error:
        yield _event(from_service(error).body)
    yield b"data: [DONE]\n\n"


def _head(shape: Shape, kind: str, model: str) -> Json:
    return {
        "id": f"{shape.id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI documents this value for "very unlikely".
    return max(logprob, -9999.0)


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
