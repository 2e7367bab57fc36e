"""The JSON body of a request."""

import codecs
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from neo_desktop.app.errors import ApiError
from neo_desktop.app.web import errors

Body = TypeVar("Body", bound=BaseModel)


async def parse(request: Request, schema: type[Body]) -> Body:
    """Return the body of a request, of any media type; none stands for an empty object."""
    body = (await request.body()).removeprefix(codecs.BOM_UTF8) or b"{}"
    try:
        return schema.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        raise errors.from_validation(error) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}: send JSON in UTF-8") from None
