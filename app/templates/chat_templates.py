"""The chat templates of one model: messages in, text and marks out."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from neo_desktop.app.templates.chat_template import ChatTemplateError
from neo_desktop.app.templates.template_process import TemplateProcess
from neo_desktop.models.marks import ChatText, Shield
from neo_desktop.models.tokenizer import Tokenizer


class ChatTemplates:
    """Renders the chats of one model; belongs to one event loop.

    Args:
        tokenizer: has the templates and the marks that they write.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        sources = dict.fromkeys(
            tokenizer.chat_template_for(has_tools=has_tools) for has_tools in (False, True)
        )
        self._processes = {source: TemplateProcess(source, tokenizer.special_tokens) for source in sources}

    async def start(self) -> None:
        """Start the child processes and find the marks, so that the first chat need not wait for them."""
        await asyncio.to_thread(getattr, self._tokenizer, "marks")
        for process in self._processes.values():
            await process.start()

    async def stop(self) -> None:
        """End the child processes; a chat that is being rendered is refused."""
        for process in self._processes.values():
            await process.stop()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        shield: Shield | None = None,
        *,
        is_continued: bool = False,
    ) -> ChatText:
        """Return a chat as the template writes it; see `EngineService.render_chat`."""
        try:
            if shield is None:
                shield = Shield(self._tokenizer.marks, messages, extra)
                messages, extra = shield.messages(messages), shield.broken(extra)
            if is_continued:
                messages = [*messages[:-1], shield.ended(messages[-1])]
            source = self._tokenizer.chat_template_for(has_tools=bool(extra and extra.get("tools")))
            text = await self._processes[source].render(messages, extra)
            return shield.read(text, is_cut=is_continued)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
