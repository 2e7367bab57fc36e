"""The user's file of MCP servers. Its secrets never leave it: not to the page, not into messages."""

import json
import re
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

FILE_NAME = "mcp.json"
_SECRET_NAME = re.compile(r"key|token|secret|passw|pwd|auth|cookie|cred", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:([^/\s@]+)@")
_MIN_SECRET_CHARS = 4  # a shorter value would hide parts of other words


class McpError(Exception):
    """An MCP server or its tool cannot be used; the message says why and what to do, without secrets."""


class ServerConfig(BaseModel):
    """One server: a program of this computer, or an address."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    command: Annotated[str, Field(min_length=1)] | None = None
    args: tuple[str, ...] = Field((), repr=False)
    env: dict[str, str] = Field({}, repr=False)
    cwd: str | None = None
    url: Annotated[str, Field(pattern=r"^https?://[^/]")] | None = Field(None, repr=False)
    headers: dict[str, str] = Field({}, repr=False)
    type: str | None = None
    disabled: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("server", "needs either a command or a url")
        if self.type == "sse":
            raise PydanticCustomError("server", "uses SSE: only stdio and streamable HTTP are supported")
        return self

    @property
    def where(self) -> str:
        """The program or the host, for people."""
        if self.command is not None:
            return PurePath(self.command).name
        parts = urlsplit(self.url or "")
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def without_secrets(self, text: str) -> str:
        """Return a text without the url, its passwords, and values whose names are those of secrets."""
        if self.url is not None:
            text = text.replace(self.url, self.where)
        parts = urlsplit(self.url or "")
        named = [*self.env.items(), *self.headers.items()]
        named += [
            (option.partition("=")[0], option.partition("=")[2] or value)
            for option, value in pairwise((*self.args, ""))
        ]
        found = [value for name, value in named if _SECRET_NAME.search(name)]
        found += [value.partition(" ")[2] for value in found]  # Bearer …
        found += [parts.query, parts.netloc.rpartition("@")[0]]
        for value in (*self.args, *self.env.values()):
            found += _PASSWORD_IN_URL.findall(value)
        for secret in sorted(found, key=len, reverse=True):
            if len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, "•••")
        return text


def read_config(file: Path) -> dict[str, ServerConfig]:
    """Read the servers by name; none if there is no file. McpError says what is wrong with it."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise McpError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found: dict[str, ServerConfig] = {}
    name = ""
    try:
        for name, fields in json.loads(text)["mcpServers"].items():
            found[name] = ServerConfig.model_validate({**fields, "name": name})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(["mcpServers", name, *map(str, first["loc"])])
        raise McpError(f"{file}: {place}: {first['msg']}") from None
    except json.JSONDecodeError as error:
        raise McpError(f"{file} is not JSON: {error}") from None
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise McpError(f'{file} must hold {{"mcpServers": {{"a name": {{"command": …}}}}}}') from None
    return {name: server for name, server in found.items() if not server.disabled}
