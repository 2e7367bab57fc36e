"""The common parts of the answers of OpenAI's endpoints."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence

from fastapi.responses import JSONResponse, Response

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.sampling import GenerationRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.outputs import Answer, Outputs, Step, TokensUsed, collect
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.models.tokenizer import Tokenizer


class Reply(ABC):
    """The answer of a chat or completion, as one object or as a stream of chunks."""

    def __init__(
        self, service: EngineService, body: GenerationRequest, outputs: Outputs, prefix: str, kind: str
    ) -> None:
        self._outputs = outputs
        self._body = body
        self._begun: set[int] = set()  # outputs
        self._tokenizer = service.tokenizer
        self._head: Json = {"id": new_id(prefix), "object": kind}
        self._head |= {"created": int(time.time()), "model": service.model_name}

    @abstractmethod
    def whole(self, index: int, answer: Answer) -> Json:
        """Return an output as a choice."""

    @abstractmethod
    def parts(self, step: Step) -> Iterator[Json]:
        """Yield an output's progress as choices of chunks."""

    async def response(self) -> Response:
        if self._body.stream:
            return EventStream(self._events(), self._outputs)
        answers = await collect(self._outputs)
        choices = [self.whole(index, answer) for index, answer in enumerate(answers)]
        return JSONResponse(self._head | {"choices": choices, "usage": usage_body(self._outputs.usage)})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the chunks and the end of the stream; an error is the last but that one."""
        head = self._head | ({"usage": None} if self._body.include_usage else {})
        try:
            async for step in self._outputs:
                for choice in self.parts(step):
                    yield event(head | {"choices": [choice]})
            if self._body.include_usage:
                yield event(head | {"choices": [], "usage": usage_body(self._outputs.usage)})
        except ApiError as error:
            yield event(error.body)
        yield b"data: [DONE]\n\n"

    def _are_sent(self, tokens: Sequence[SampledToken]) -> bool:
        """Return whether a chunk is sent for tokens without text."""
        has_logprobs = any(token.logprob is not None for token in tokens)
        return has_logprobs or (bool(tokens) and bool(self._body.return_token_ids))

    def _token_ids(self, tokens: Sequence[SampledToken]) -> Json:
        return {"token_ids": [token.token_id for token in tokens]} if self._body.return_token_ids else {}


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def usage_body(usage: TokensUsed) -> Json:
    accepted, rejected = usage.predicted
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_thought_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def token_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> list[Json]:
    """Log-probabilities of tokens, as chats and responses write them."""

    def entry(token: TokenLogprob) -> Json:
        text = tokenizer.token_text(token.token_id)
        token_bytes = list(tokenizer.token_bytes(token.token_id))
        return {"token": text, "logprob": finite(token.logprob), "bytes": token_bytes}

    return [
        entry(token.logprob) | {"top_logprobs": [entry(top) for top in token.top_logprobs]}
        for token in tokens
        if token.logprob is not None
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI documents this value for "very unlikely"."""
    return max(logprob, -9999.0)
