"""The MCP servers of the user's file: started on demand, ended with the program."""

import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neo_desktop.app.mcp.config import FILE_NAME, McpError, read_config
from neo_desktop.app.news import TOOLS, News

if TYPE_CHECKING:
    from neo_desktop.app.mcp.session import ServerTool, Session, ToolResult


@dataclass(frozen=True, slots=True)
class ServerState:
    name: str
    where: str
    is_starting: bool
    tools: tuple[str, ...]  # of its last start
    error: str | None


class McpServers:
    """All servers of the file, by name; a changed entry of the file takes effect at the next use."""

    def __init__(self, folder: Path, news: News) -> None:
        self.file = folder / FILE_NAME
        self._news = news
        self._sessions: dict[str, Session] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tools: dict[str, tuple[str, ...]] = {}
        self._errors: dict[str, str] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def states(self) -> list[ServerState]:
        """Return the servers of the file, in its order; McpError."""
        return [
            ServerState(
                config.name,
                config.where,
                self._locks[config.name].locked(),
                self._tools.get(config.name, ()),
                self._errors.get(config.name),
            )
            for config in read_config(self.file).values()
        ]

    def start_soon(self, names: Iterable[str]) -> None:
        """Start servers in the background; `states` has the outcome."""
        for name in names:
            task = asyncio.create_task(self._try_start(name))
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)

    async def tools(self, names: Iterable[str]) -> "list[ServerTool]":
        """Return the tools of servers, and start those that do not run. McpError: one cannot be used."""
        lists = await asyncio.gather(*map(self._listed, names))
        return [tool for one in lists for tool in one]

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> "ToolResult":
        """Run a tool; McpError says why it could not be run."""
        session = await self._session(server)
        return await session.call(tool, arguments)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._errands:
            task.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def _try_start(self, name: str) -> None:
        with contextlib.suppress(McpError):  # it is kept in `_errors`
            await self._listed(name)

    async def _listed(self, name: str) -> "list[ServerTool]":
        """List a server's tools; one that has ended unseen is started once more."""
        self._news.tell(TOOLS)
        try:
            session = await self._session(name)
            try:
                tools = await session.tools()
            except McpError:
                if not session.is_over:
                    raise
                session = await self._session(name)
                tools = await session.tools()
        except McpError as error:
            self._errors[name] = str(error)
            raise
        else:
            self._errors.pop(name, None)
            self._tools[name] = tuple(tool.name for tool in tools)
            return tools
        finally:
            self._news.tell(TOOLS)

    async def _session(self, name: str) -> "Session":
        """Return the running server of the present file."""
        session_class = await asyncio.to_thread(_session_class)  # its imports take a second
        config = read_config(self.file).get(name)
        if config is None:
            raise McpError(f"there is no MCP server {name!r} in {self.file}: switch it off, or add it")
        async with self._locks[name]:
            if self._is_closed:
                raise McpError("the program ends")
            session = self._sessions.get(name)
            if session is not None and (session.is_over or session.config != config):
                await session.close()
                session = None
            if session is None:
                session = self._sessions[name] = session_class(config)
                await session.started()
            return session


def _session_class() -> "type[Session]":
    try:
        from neo_desktop.app.mcp.session import Session
    except ImportError as error:  # or too old a version
        raise McpError(
            f"tools of MCP servers need the package {error.name}: "
            f"{sys.executable} -m pip install 'neo-desktop[mcp]'"
        ) from error
    return Session
