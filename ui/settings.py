"""The settings of a chat: system prompt, MCP servers with their tools, and how tokens are drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.chats.chats import check_settings
from neo_desktop.app.chats.messages import Chat, NotPossibleError, Settings
from neo_desktop.app.mcp.config import McpError
from neo_desktop.app.mcp.servers import ServerState
from neo_desktop.engine.errors import SettingError
from neo_desktop.ui.chat import ChatView, Look
from neo_desktop.ui.following import QUIET
from neo_desktop.ui.html import panel, tag
from neo_desktop.ui.refusals import telling

# field, label, hint, whole numbers only
NUMBERS = (
    ("temperature", "Temperature", "0 is the most predictable", False),
    ("top_p", "Top-p", "Likeliest tokens up to this total", False),
    ("top_k", "Top-k", "Likeliest tokens up to this many", True),
    ("min_p", "Min-p", "Share of the likeliest token's chance", False),
    ("repetition_penalty", "Repetition penalty", "Above 1: fewer repeats", False),
    ("max_tokens", "Max tokens", "Longest answer", True),
    ("seed", "Seed", "Same seed, same answer", True),
)


class SettingsView:
    """The components of the settings, and what their events do."""

    def __init__(self, chat: ChatView) -> None:
        self._chat = chat
        self._servers = chat.chats.servers
        gr.Markdown("### Settings\nThey hold for this chat, from the next answer on.")
        prompt = gr.Textbox(label="System prompt", lines=4, placeholder="none", elem_id="system-prompt")
        self.servers = gr.CheckboxGroup(
            label="Tools of MCP servers",
            info="The model may ask to use them. You allow each call.",
            choices=[],
            visible=False,
            elem_id="mcp-servers",
        )
        self.states = panel(elem_id="mcp-states")
        numbers = [
            gr.Number(label=label, info=hint, value=None, precision=0 if is_whole else None, elem_id=name)
            for name, label, hint, is_whole in NUMBERS
        ]
        self.reset = gr.Button("Reset to the model's own", size="sm")
        self.fields: list[Any] = [prompt, *numbers]  # in the order of `values`
        self.components = [*self.fields, self.servers, self.states]  # that `shown` writes

    def connect(self) -> None:
        look, fields = self._chat.look, self.fields
        left = [component.blur for component in fields]
        # Gradio's default drops a field that is left while the one before is being kept.
        gr.on(left, self.keep, [look, *fields], None, trigger_mode="always_last", **QUIET)
        self.reset.click(self.clear, [look], fields, **QUIET)
        self.servers.input(self.choose, [look, self.servers], None, **QUIET)

    @staticmethod
    def values(settings: Settings) -> list[Any]:
        """Return what the fields show."""
        return [settings.system_prompt or "", *(getattr(settings, name) for name, *_ in NUMBERS)]

    async def keep(self, look: Look, *values: Any) -> None:
        settings, refusals = applied(_settings(await self._chat.present(look)), values)
        await self._set(look, settings)
        if refusals:
            with telling():
                raise NotPossibleError("; ".join(refusals))

    async def clear(self, look: Look) -> list[Any]:
        """Take the model's own settings."""
        await self._set(look, Settings(servers=_settings(await self._chat.present(look)).servers))
        return self.values(Settings())

    async def choose(self, look: Look, servers: list[str]) -> None:
        """Write down which servers the chat uses, and start those that are new."""
        settings = _settings(await self._chat.present(look))
        await self._set(look, replace(settings, servers=tuple(servers)))
        self._servers.start_soon(set(servers) - set(settings.servers))

    async def _set(self, look: Look, settings: Settings) -> None:
        chat = await self._chat.present(look)
        with telling():
            if chat is None:
                if settings == Settings():
                    return
                chat = await self._chat.chats.create(settings)
                self._chat.go(look, chat.entry.id)
            if chat.settings != settings:
                await self._chat.chats.change(chat.entry.id, settings=settings)

    def shown(self, chat: Chat | None) -> dict[Any, Any]:
        """Return what each component shows for a chat; a new chat has the model's own settings."""
        settings = _settings(chat)
        try:
            states, error = self._servers.states(), None
        except McpError as reason:
            states, error = [], str(reason)
        names = list(dict.fromkeys([*(state.name for state in states), *settings.servers]))
        boxes = gr.update(choices=names, value=list(settings.servers), visible=bool(names))
        lines = [_line(state) for state in states if state.name in settings.servers]
        file = tag("code", self._servers.file)
        hint = tag("p", "To give the model tools, list MCP servers in ", file, class_="muted")
        trouble = tag("p", _sentence(error), class_="error") if error else hint if not names else None
        fields = dict(zip(self.fields, self.values(settings), strict=True))
        return fields | {self.servers: boxes, self.states: tag("div", lines, trouble)}


def applied(settings: Settings, values: Sequence[Any]) -> tuple[Settings, list[str]]:
    """Return the settings with the valid ones of the values that a page shows, and why others are refused."""
    refusals = []
    names = ("system_prompt", *(name for name, *_ in NUMBERS))
    for name, value in zip(names, values, strict=True):
        field: dict[str, Any] = {name: None if value == "" else value}
        changed = replace(settings, **field)
        try:
            check_settings(changed)
        except (SettingError, NotPossibleError) as error:
            refusals.append(str(error))
        else:
            settings = changed
    return settings, refusals


def _settings(chat: Chat | None) -> Settings:
    return Settings() if chat is None else chat.settings


def _line(state: ServerState) -> Markup:
    """Return a line about a server: its tools, or why it has none."""
    if state.error is not None and not state.is_starting:
        return tag("p", _sentence(state.error), class_="error")
    what = "starting …" if state.is_starting else ", ".join(state.tools) or "starts with the next question"
    return tag("p", tag("strong", f"{state.name} ({state.where})"), ": ", what, class_="muted")


def _sentence(error: str) -> str:
    return error[:1].upper() + error[1:]
