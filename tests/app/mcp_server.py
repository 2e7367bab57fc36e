"""A real MCP server over streamable HTTP, in a thread; its requests need a header."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.responses import PlainTextResponse

from neo_desktop.app.web.server import claim_port

SECRET = "s3cret-of-the-test"


@dataclass
class Notes:
    """The server: its address, and the calls that its tools have seen."""

    url: str
    calls: list[tuple[object, ...]] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return {"url": self.url, "headers": {"Authorization": f"Bearer {SECRET}"}}


@contextlib.contextmanager
def notes_server() -> Iterator[Notes]:
    """Serve the tools `add`, `fail`, `long` and `slow`."""
    socket = claim_port("127.0.0.1", 0)
    notes = Notes(f"http://127.0.0.1:{socket.getsockname()[1]}/mcp")
    tools = MCPServer("notes")

    @tools.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        notes.calls.append((a, b))
        return a + b

    @tools.tool()
    def fail() -> str:
        """Fail."""
        raise ToolError(f"no luck with {SECRET}")

    @tools.tool(name="a long one")
    def long() -> str:
        """Return a long text."""
        return "x" * 100_000

    @tools.tool()
    async def slow() -> str:
        """Return nothing for a long time."""
        await anyio.sleep(3600)
        return ""

    app = tools.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if (
            scope["type"] == "http"
            and (b"authorization", f"Bearer {SECRET}".encode()) not in scope["headers"]
        ):
            await PlainTextResponse("no", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(guarded, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield notes
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
