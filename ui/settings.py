"""The settings of a chat: system prompt, and how tokens are drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gradio as gr

from neo_desktop.app.chats.chats import check_settings
from neo_desktop.app.chats.messages import Chat, NotPossibleError, Settings
from neo_desktop.engine.errors import SettingError
from neo_desktop.ui.chat import ChatView
from neo_desktop.ui.following import QUIET
from neo_desktop.ui.look import Look
from neo_desktop.ui.refusals import telling
from neo_desktop.ui.tools import ToolsView

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
        gr.Markdown("### Settings\nThey hold for this chat, from the next answer on.")
        self.prompt = gr.Textbox(label="System prompt", lines=4, placeholder="none", elem_id="system-prompt")
        self.tools = ToolsView(chat, self._set)
        self.numbers = [
            gr.Number(label=label, info=hint, value=None, precision=0 if is_whole else None, elem_id=name)
            for name, label, hint, is_whole in NUMBERS
        ]
        self.reset = gr.Button("Reset to the model's own", size="sm")

    @property
    def components(self) -> list[Any]:
        """The components that `shown` writes."""
        return [*self.fields, *self.tools.components]

    @property
    def fields(self) -> list[Any]:
        """The components that show settings, in the order of `values`."""
        return [self.prompt, *self.numbers]

    def connect(self) -> None:
        """Let the events of the components have their effects."""
        look, shown = self._chat.look, self.fields
        left = [component.blur for component in shown]
        # Gradio's default drops a field that is left while the one before is being kept.
        gr.on(left, self.keep, [look, *shown], None, trigger_mode="always_last", **QUIET)
        self.reset.click(self.clear, [look], shown, **QUIET)
        self.tools.connect()

    @staticmethod
    def values(settings: Settings) -> list[Any]:
        """Return what the components show."""
        return [settings.system_prompt or "", *(getattr(settings, name) for name, *_ in NUMBERS)]

    async def keep(self, look: Look, *values: Any) -> None:
        """Write the settings down."""
        settings, refusals = applied(_settings(await self._chat.present(look)), values)
        await self._set(look, settings)
        if refusals:
            with telling():
                raise NotPossibleError("; ".join(refusals))

    async def clear(self, look: Look) -> list[Any]:
        """Take the model's own settings."""
        await self._set(look, Settings(servers=_settings(await self._chat.present(look)).servers))
        return self.values(Settings())

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
        return dict(zip(self.fields, self.values(settings), strict=True)) | self.tools.shown(settings)


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
