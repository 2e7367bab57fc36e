"""The JSON body of a request."""

import asyncio
import codecs
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from neo_desktop.app.errors import ApiError
from neo_desktop.app.web import errors

_OTHER_FORMS = ("multipart/", "application/x-www-form-urlencoded", "application/xml", "text/xml")
SHORT_BYTES = 16_384  # validated in less time than the way to a thread and back takes

Body = TypeVar("Body", bound=BaseModel)


async def parse(request: Request, schema: type[Body]) -> Body:
    """Return the body of a request; none stands for an empty object."""
    body = (await request.body()).removeprefix(codecs.BOM_UTF8) or b"{}"
    content_type = request.headers.get("content-type", "").lower()
    charset = content_type.partition("charset=")[2].partition(";")[0].strip(" \"'")
    if charset not in ("", "utf-8", "utf8", "us-ascii", "ascii"):
        raise ApiError(415, f"the body is said to be {charset[:40]!r}: send JSON in UTF-8")
    try:
        if len(body) <= SHORT_BYTES:
            return _validated(body, schema)
        return await asyncio.to_thread(_validated, body, schema)
    except ValidationError as error:
        raise errors.from_validation(error) from None
    except ValueError as error:
        if content_type.startswith(_OTHER_FORMS):
            kind = content_type.partition(";")[0]
            message = f"the body is said to be {kind}: send JSON as application/json"
            raise ApiError(415, message) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _validated(body: bytes, schema: type[Body]) -> Body:
    return schema.model_validate(from_json(body, allow_inf_nan=False))
