"""Calls of MCP servers' tools in chats: the user allows each one before it runs.

the model calls ──→ asked: the page shows tool and arguments ── refuse ──→ the model reads it
                                     └─ allow, always ──→ server ── result ──→ the model continues
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from neo_desktop.app.chats.messages import NotPossibleError, place_of
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.app.generate.history import arguments_of
from neo_desktop.app.mcp.config import McpError
from neo_desktop.app.mcp.servers import McpServers

if TYPE_CHECKING:
    from neo_desktop.app.mcp.session import ServerTool

MAX_ROUNDS = 25  # of calls in a run of an answer
MAX_RESULT_CHARS = 40_000
MAX_NAME_CHARS = 64
REFUSED = "The user refused this call. Do not repeat it: go on without it, or ask the user."

Decision = Literal["allow", "always", "refuse"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)


class ToolCalls:
    """Asks, runs, and remembers until the end of the program what is always allowed in a chat."""

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._waiting: dict[tuple[str, str], asyncio.Future[Decision]] = {}  # message, place
        self._allowed: set[tuple[str, str, str]] = set()  # chat, server, tool

    async def tools(self, servers: Sequence[str]) -> "dict[str, ServerTool]":
        """Return the tools of servers by the names for the model, unlike each other. McpError."""
        tools = await self._servers.tools(servers)
        names = Counter(tool.name for tool in tools)
        found: dict[str, ServerTool] = {}
        for tool in tools:
            name = tool.name if names[tool.name] == 1 else f"{tool.server}_{tool.name}"
            name = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:MAX_NAME_CHARS]
            if name in found:
                name = f"{name[: MAX_NAME_CHARS - 4]}_{len(found)}"
            found[name] = tool
        return found

    def decide(self, decision: Decision, message_id: str, place: str) -> None:
        """Answer the question about a call (`place_of`); NotPossibleError: none is asked."""
        waiting = self._waiting.get((message_id, place))
        if waiting is None or waiting.done():
            raise NotPossibleError("this call waits for no decision: it has been decided, or stopped")
        waiting.set_result(decision)

    async def settle(
        self,
        answer: GrowingAnswer,
        tools: "Mapping[str, ServerTool]",
        max_chars: int,
        told: Callable[[], None],
    ) -> None:
        """Give the open calls of an answer's last round their results, one after the other."""
        for place, call in answer.open_calls:
            tool = tools.get(call.name)
            arguments = arguments_of(call.arguments)
            if tool is None:
                known = ", ".join(tools) or "none"
                answer.change_call(place, "failed", f"Error: there is no tool {call.name!r}, only: {known}")
            elif isinstance(arguments, str):
                answer.change_call(place, "failed", "Error: the arguments are not a JSON object")
            elif not await self._is_allowed(answer, place, tool, told, was_begun=call.state == "running"):
                answer.change_call(place, "refused", REFUSED)
            else:
                answer.change_call(place, "running", server=tool.server)
                told()
                try:
                    result = await self._servers.call(tool.server, tool.name, arguments)
                    is_done, text = not result.is_error, result.text
                except McpError as error:
                    is_done, text = False, f"Error: {error}"
                text = cut(text, min(max_chars, MAX_RESULT_CHARS))
                answer.change_call(place, "done" if is_done else "failed", text)
            told()

    async def _is_allowed(
        self,
        answer: GrowingAnswer,
        place: int,
        tool: "ServerTool",
        told: Callable[[], None],
        *,
        was_begun: bool,
    ) -> bool:
        """Ask the user, unless this tool is always allowed in this chat and its call was not interrupted."""
        message = answer.message
        permission = (message.chat_id, tool.server, tool.name)
        if permission in self._allowed and not was_begun:
            return True
        key = (message.id, place_of(len(message.rounds) - 1, place))
        waiting: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        answer.change_call(place, "asked", server=tool.server)
        told()
        try:
            decision: Decision = await waiting
        finally:
            del self._waiting[key]
        if decision == "always":
            self._allowed.add(permission)
        return decision != "refuse"


def cut(text: str, max_chars: int) -> str:
    """Return a result that fits the model's context: a long one is cut, with a sentence that says so."""
    if len(text) <= max_chars:
        return text
    told = f"[The result has {len(text):,} characters; these are the first {max_chars:,}.]"
    return f"{text[:max_chars]}\n{told}"
