"""The JSON body of a request."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from neo_desktop.app.web import errors

SHORT_BYTES = 16_384  # validated in less time than the way to a thread and back takes

Body = TypeVar("Body", bound=BaseModel)


async def parse(request: Request, schema: type[Body]) -> Body:
    """Return the body of a request; none stands for an empty object.

    Raises:
        ApiError: it says what is wrong with it.
    """
    body = await request.body() or b"{}"
    try:
        if len(body) <= SHORT_BYTES:
            return schema.model_validate_json(body)
        return await asyncio.to_thread(schema.model_validate_json, body)
    except ValidationError as error:
        raise errors.from_validation(error) from None
