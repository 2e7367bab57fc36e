"""The common parts of the answers of OpenAI's endpoints."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from neo_desktop.app.api.fields import Json
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.outputs import TokensUsed
from neo_desktop.app.web.connection import event
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.models.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


async def until_done(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events of a stream and the one that ends it; an error is the last but that one."""
    try:
        async for one in events:
            yield one
    except ApiError as error:
        yield event(error.body)
    yield DONE


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def head(prefix: str, kind: str, model: str) -> Json:
    """Return the first fields of an answer."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


def usage_body(usage: TokensUsed) -> Json:
    """The usage object of chats and completions."""
    accepted, rejected = (sum(counts) for counts in zip((0, 0), *usage.predicted.values(), strict=True))
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
