"""One running MCP server: a child process with pipes, or a connection over HTTP."""

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    CallToolResult,
    EmbeddedResource,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from neo_desktop.app.mcp.config import McpError, ServerConfig

# Their records quote what servers send, and addresses: both may hold secrets.
for _name in ("mcp", "client"):  # the package has both
    logging.getLogger(_name).setLevel(logging.CRITICAL)
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)

START_S = 60.0  # a command may download its program first
CALL_S = 120.0
MAX_TOOLS = 200  # of a server
MAX_PAGES = 20
SAID_LINES, SAID_CHARS = 3, 300  # of a server's stderr, for its error
MAX_LINE_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as its server describes it; `parameters` is a JSON schema."""

    server: str
    name: str
    description: str | None
    parameters: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that a tool has returned; `is_error`: the tool says that it failed."""

    text: str
    is_error: bool


class Session:
    """A server from its start to its end. One task enters and leaves the client: anyio demands it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._said: deque[str] = deque(maxlen=SAID_LINES)  # the last lines of its stderr
        self._refusal = ""  # the status of the last HTTP answer, if it was an error
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def started(self) -> Client:
        """Wait for the server; McpError: it does not start."""
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise self._error(f"did not answer within {START_S:.0f} s after its start") from None

    async def tools(self) -> list[ServerTool]:
        """List the server's tools anew; McpError."""
        client = await self.started()
        found: list[ServerTool] = []
        cursor = None
        async with self._explained("does not list its tools"):
            async with asyncio.timeout(START_S):
                for _ in range(MAX_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    for one in page.tools:
                        found.append(
                            ServerTool(self.config.name, one.name, one.description, dict(one.input_schema))
                        )
                    cursor = page.next_cursor
                    if cursor is None or len(found) >= MAX_TOOLS:
                        break
        return found[:MAX_TOOLS]

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a tool; McpError: the server failed, or the time limit passed."""
        client = await self.started()
        too_long = f"has not returned from {tool!r} within {CALL_S:.0f} s"
        async with self._explained(f"failed at {tool!r}", too_long):
            async with asyncio.timeout(CALL_S):
                result = await client.call_tool(tool, arguments)
        return ToolResult(self.config.without_secrets(_text(result)), bool(result.is_error))

    @property
    def is_over(self) -> bool:
        return self._task.done() or self._closing.is_set()

    async def close(self) -> None:
        """End the server, and its child process with all that it started."""
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async with self._client() as client:
                self._ready.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # also groups of a cancelled task
            if not self._ready.done():
                self._ready.set_exception(self._error(f"does not start: {self._reason(error)}"))
                self._ready.exception()  # a session may be closed before anyone waits
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._closing.set()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        config = self.config
        async with contextlib.AsyncExitStack() as stack:
            if config.command is not None:
                read_end, write_end = os.pipe()
                reader = threading.Thread(
                    target=self._listen, args=(read_end,), name="mcp-stderr", daemon=True
                )
                reader.start()
                stack.push_async_callback(asyncio.to_thread, reader.join, 1.0)
                errors = stack.enter_context(os.fdopen(write_end, "w"))
                parameters = StdioServerParameters(
                    command=config.command, args=list(config.args), env=config.env, cwd=config.cwd
                )
                transport = stdio_client(parameters, errors)
            else:
                timeout = httpx2.Timeout(START_S, read=None)  # of a whole call: CALL_S
                http = await stack.enter_async_context(
                    httpx2.AsyncClient(
                        headers=config.headers, timeout=timeout, event_hooks={"response": [self._note]}
                    )
                )
                transport = streamable_http_client(config.url or "", http_client=http)
            info = Implementation(name="neo-desktop", version=version("neo-desktop"))
            yield await stack.enter_async_context(Client(transport, client_info=info))

    async def _note(self, response: httpx2.Response) -> None:
        status = f" (HTTP {response.status_code} {response.reason_phrase})"
        self._refusal = status if response.is_error else ""

    def _listen(self, read_end: int) -> None:
        """Keep the last lines of the server's stderr."""
        with open(read_end, encoding="utf-8", errors="replace") as stream:
            while line := stream.readline(MAX_LINE_CHARS):
                if line.strip():
                    self._said.append(self.config.without_secrets(line.strip())[:SAID_CHARS])

    @contextlib.asynccontextmanager
    async def _explained(self, what: str, too_long: str = "does not answer") -> AsyncIterator[None]:
        """Turn the client's errors into sentences; a closed connection ends the session."""
        try:
            yield
        except TimeoutError:
            raise self._error(too_long) from None
        except Exception as error:
            is_answer = isinstance(error, MCPError | ValidationError | RuntimeError)
            if not is_answer or _is_closed(error):
                await self.close()  # then its last words are read
            raise self._error(f"{what}: {self._reason(error)}") from None

    def _reason(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError):
            return f"{error.filename or self.config.where!r} was not found: install it, or correct its entry"
        if _is_closed(error) and self.config.command is not None:
            said = " ".join(self._said) or "it said nothing"
            return f"it ended. It said last: {said}"
        if isinstance(error, httpx2.HTTPError):
            return f"{self.config.where} cannot be reached: {error or type(error).__name__}"
        if isinstance(error, ValidationError):
            return "its answer does not follow the protocol"
        return (str(error) or type(error).__name__) + self._refusal

    def _error(self, what: str) -> McpError:
        return McpError(self.config.without_secrets(f"the MCP server {self.config.name!r} {what}"))


def _is_closed(error: BaseException) -> bool:
    return isinstance(error, MCPError) and error.code == CONNECTION_CLOSED


def _text(result: CallToolResult) -> str:
    """Return a result's texts; other content is named."""
    parts: list[str] = []
    for part in result.content:
        match part:
            case TextContent():
                parts.append(part.text)
            case EmbeddedResource(resource=TextResourceContents() as resource):
                parts.append(resource.text)
            case ResourceLink():
                parts.append(str(part.uri))
            case _:
                parts.append(f"[Content of type {part.type!r} is left out.]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts).encode("utf-8", "replace").decode()
