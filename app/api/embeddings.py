"""POST /v1/embeddings: texts as vectors, from the hidden states of the loaded model."""

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
from fastapi.responses import JSONResponse, Response

from neo_desktop.app.api.fields import Model, Prompts
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError, blaming
from neo_desktop.engine.errors import NoEmbeddingsError, SettingError


class EmbeddingRequest(Model):
    model: str | None = None
    input: Prompts  # one text or several
    encoding_format: Literal["float", "base64"] | None = None  # base64: of 32-bit floats, little-endian
    dimensions: int | None = None  # only as many as the model has
    pooling: Literal["mean", "last"] | None = None  # over all tokens (the default), or the last one alone
    add_special_tokens: Literal[True] | None = None


async def answer(service: EngineService, body: EmbeddingRequest) -> Response:
    with blaming("input"):
        try:
            found = await service.embed(body.input, body.pooling or "mean")
        except NoEmbeddingsError as error:
            raise ApiError(400, str(error), param="model", code="no_embeddings") from error
    num_dimensions = len(found[0][0])
    if body.dimensions not in (None, num_dimensions):
        reason = f"must be {num_dimensions}, which this model's vectors have, or left out"
        raise SettingError("dimensions", reason)
    num_tokens = sum(tokens for _, tokens in found)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, (vector, _) in enumerate(found)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"object": "list", "model": service.model_name, "data": data, "usage": usage})


def _encoded(vector: Sequence[float], form: str | None) -> Sequence[float] | str:
    if form != "base64":
        return vector
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
