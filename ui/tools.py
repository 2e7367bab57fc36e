"""The MCP servers of the user's file, with a box for each that a chat may use."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.chats.messages import Settings
from neo_desktop.app.mcp.config import McpError
from neo_desktop.app.mcp.servers import ServerState
from neo_desktop.ui.chat import ChatView
from neo_desktop.ui.following import QUIET
from neo_desktop.ui.html import panel, tag
from neo_desktop.ui.look import Look


class ToolsView:
    """A box per server, and the state of the servers that are on."""

    def __init__(self, chat: ChatView, keep: Callable[[Look, Settings], Awaitable[None]]) -> None:
        self._chat = chat
        self._keep = keep
        self._servers = chat.chats.servers
        self.names = gr.CheckboxGroup(
            label="Tools of MCP servers",
            info="The model may ask to use them. You allow each call.",
            choices=[],
            visible=False,
            elem_id="mcp-servers",
        )
        self.states = panel(elem_id="mcp-states")

    @property
    def components(self) -> list[Any]:
        """The components that `shown` writes."""
        return [self.names, self.states]

    def connect(self) -> None:
        """Let a box switch its server on or off."""
        self.names.input(self.choose, [self._chat.look, self.names], None, **QUIET)

    async def choose(self, look: Look, names: list[str]) -> None:
        """Write down which servers the chat uses, and start those that are new."""
        chat = await self._chat.present(look)
        settings = Settings() if chat is None else chat.settings
        await self._keep(look, replace(settings, servers=tuple(names)))
        self._servers.start_soon(set(names) - set(settings.servers))

    def shown(self, settings: Settings) -> dict[Any, Any]:
        """Return what each component shows."""
        try:
            states, error = self._servers.states(), None
        except McpError as reason:
            states, error = [], str(reason)
        names = list(dict.fromkeys([*(state.name for state in states), *settings.servers]))
        boxes = gr.update(choices=names, value=list(settings.servers), visible=bool(names))
        lines = [_line(state, state.name in settings.servers) for state in states]
        hint = tag(
            "p",
            "To give the model tools, list MCP servers in ",
            tag("code", self._servers.file),
            class_="muted",
        )
        trouble = tag("p", _sentence(error), class_="error") if error else hint if not names else None
        return {self.names: boxes, self.states: tag("div", lines, trouble)}


def _line(state: ServerState, is_on: bool) -> Markup | None:
    """Return a line about a server that is on: its tools, or why it has none."""
    if not is_on:
        return None
    if state.error is not None and not state.is_starting:
        return tag("p", _sentence(state.error), class_="error")
    what = "starting …" if state.is_starting else ", ".join(state.tools) or "starts with the next question"
    return tag("p", tag("strong", f"{state.name} ({state.where})"), ": ", what, class_="muted")


def _sentence(error: str) -> str:
    return error[:1].upper() + error[1:]
