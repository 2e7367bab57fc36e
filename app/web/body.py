"""The JSON body of a request."""

import asyncio
import codecs
import json
from collections import Counter
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from neo_desktop.app.errors import ApiError
from neo_desktop.app.web import errors

_OTHER_FORMS = ("multipart/", "application/x-www-form-urlencoded", "application/xml", "text/xml")
SHORT_BYTES = 16_384  # validated in less time than the way to a thread and back takes

Body = TypeVar("Body", bound=BaseModel)


async def parse(request: Request, schema: type[Body]) -> Body:
    """Return the body of a request; none stands for an empty object.

    Raises:
        ApiError: it says what is wrong with it.
    """
    body = (await request.body()).removeprefix(codecs.BOM_UTF8) or b"{}"
    content_type = request.headers.get("content-type", "").lower()
    _check_charset(content_type)
    try:
        if len(body) <= SHORT_BYTES:
            return _validated(body, schema)
        return await asyncio.to_thread(_validated, body, schema)
    except ValidationError as error:
        is_json = error.errors()[0]["type"] != "json_invalid"
        if not is_json and content_type.startswith(_OTHER_FORMS):
            kind = content_type.partition(";")[0]
            raise ApiError(415, f"the body is said to be {kind}: send JSON as application/json") from None
        raise errors.from_validation(error) from None


def _check_charset(content_type: str) -> None:
    _, _, charset = content_type.partition("charset=")
    charset = charset.partition(";")[0].strip(" \"'")
    if charset not in ("", "utf-8", "utf8", "us-ascii", "ascii"):
        raise ApiError(415, f"the body is said to be {charset[:40]!r}: send JSON in UTF-8")


def _validated(body: bytes, schema: type[Body]) -> Body:
    value = schema.model_validate_json(body)
    try:
        json.loads(body, object_pairs_hook=_check_names, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON: a number in it has too many digits") from None
    return value


def _check_names(members: list[tuple[str, Any]]) -> None:
    """Refuse an object that gives one name two values, of which one would be ignored."""
    if len({name for name, _ in members}) < len(members):
        ((twice, _),) = Counter(name for name, _ in members).most_common(1)
        shown = "".join(char if char.isprintable() else "?" for char in twice[:100])
        raise ApiError(400, f"{shown} is given twice in one object: give it once", param=shown)


def _refuse_constant(constant: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {constant} is no number of JSON")
