"""The errors that answer a request: each class has its HTTP status and its code for programs."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from starlette.responses import JSONResponse

from neo_desktop.engine.errors import ContextLengthError, SettingError

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200: its message says why and what to do; `param` is the field to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's clients."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error object of Anthropic's clients."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """Return the error object in the shape that clients of this path understand."""
        body = self.anthropic_body if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, self.headers)


@contextlib.contextmanager
def blaming(field: str) -> Iterator[None]:
    """Let an error of a value name the field of the body that holds it; errors of settings name their own."""
    try:
        yield
    except SettingError:
        raise
    except ContextLengthError as error:
        raise ApiError(400, str(error), param=field, code="context_length_exceeded") from error
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from error


class ServiceError(ApiError):
    """A request that the service could not take or could not finish."""

    http_status: ClassVar = 503
    kind: ClassVar = "unavailable"  # `code` of errors without another
    health: ClassVar = "failed"  # the server's state while new requests meet this error

    def __init__(self, message: str, kind: str | None = None) -> None:
        headers = {"Retry-After": "1"} if self.http_status == 503 else None
        super().__init__(self.http_status, message, code=kind or self.kind, headers=headers)


class ServiceStoppedError(ServiceError):
    kind = "shutting_down"
    health = "stopping"


class EngineFailedError(ServiceError):
    """The engine gave the request up."""

    http_status = 500
    kind = "engine_failed"


class DeadEndError(EngineFailedError):
    """The grammar that the answer must follow allows nothing more."""

    kind = "grammar_dead_end"


class NoModelError(ServiceError):
    kind = "no_model"
    health = "no model"


class ModelLoadingError(NoModelError):
    """A model is being loaded; the same request may succeed later."""

    kind = "model_loading"
    health = "loading"


class EngineRestartingError(ModelLoadingError):
    """The engine ended and is being started again; the same request may succeed later."""

    kind = "engine_restarting"
    health = "restarting"


class EngineGoneError(NoModelError):
    """The engine ended too often to be started again."""

    kind = "engine_failed"
    health = "failed"
