"""Turns what fails while a request is answered into `ApiError`."""

from collections.abc import Sequence
from typing import get_args

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType
from starlette.exceptions import HTTPException

from neo_desktop.app.errors import ApiError

_OWN_WORDS = {
    "missing": "is missing",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters or fewer",
    "too_short": "must hold {min_length} or more, got {actual_length}",
    "too_long": "must hold {max_length} or fewer, got {actual_length}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "extra_forbidden": "is not a field that this server knows; leave it out",
}
_PYDANTICS = frozenset(get_args(ErrorType))
_MAX_FIELD_CHARS = 200


def from_validation(error: ValidationError) -> ApiError:
    """Name the first field of a body that cannot be used, in words of this program."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    field = _field(first["loc"])
    reason = first["msg"]  # of the models' own checks
    if first["type"] in _PYDANTICS:
        reason = _OWN_WORDS.get(first["type"], "has a value that cannot be used").format(**context)
    return ApiError(400, f"{field or 'the body'} {reason}", param=field or None)


def _field(place: Sequence[int | str]) -> str:
    """`messages[0].content`; names come from the client and may hold anything."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    field = "".join(parts).lstrip(".")[:_MAX_FIELD_CHARS]
    return "".join(char if char.isprintable() else "?" for char in field)


def install(app: FastAPI) -> None:
    """Let all errors of an app have this shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: f"there is no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> JSONResponse:
        # The server logs the traceback; it is none of the client's business.
        message = "the server failed to answer; its log says why"
        return ApiError(500, message, code="internal_error").response(request.url.path)
