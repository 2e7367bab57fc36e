"""The chat templates of one model, in processes of their own, which may be ended at any time.

Templates come with downloaded models and are programs: `{{ 'x' * 10**10 }}` takes 10 GB, a macro that calls
itself twice never ends, and neither can be interrupted within this process. There, the system bounds both:

    event loop                                     child: chat_template.py
    ──────────                                     ───────────────────────
    source, special tokens ─── stdin ────────────→ kept
    [messages, extra]      ─── stdin ────────────→ rendered, within processor time and memory
    the prompt, or why not ←── stdout ───────────  {"text": …} or {"error": …}
    (end of this process)  ─── end of stdin ─────→ ends
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from neo_desktop.app.templates import chat_template
from neo_desktop.app.templates.chat_template import MAX_CPU_S, MAX_MEMORY_BYTES, ChatTemplateError
from neo_desktop.models.marks import ChatText, Shield
from neo_desktop.models.tokenizer import Tokenizer

MAX_MESSAGES = 10_000  # of a chat
MAX_WAIT_S = 20.0  # on a busy computer, processor time takes longer
_PROGRAM = "import sys; sys.path += sys.argv[1:]; import chat_template; chat_template.main()"


class ChatTemplates:
    """Renders the chats of one model, with a limit on their messages; belongs to one event loop."""

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

    def check_count(self, messages: Sequence[object]) -> None:
        """Raise ChatTemplateError if there are too many messages."""
        if len(messages) > MAX_MESSAGES:
            raise ChatTemplateError(f"the chat has {len(messages)} messages, but {MAX_MESSAGES} is the limit")

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        shield: Shield | None = None,
        *,
        is_continued: bool = False,
    ) -> ChatText:
        """Return a chat as the model's template writes it, for the assistant's next message.

        Args:
            extra: for the template alone, with "tools" among it.
            shield: that has broken the marks in both already; None: they are broken here.
            is_continued: leave out what the template writes after the last message's text.

        Raises ChatTemplateError: also if there are too many messages.
        """
        self.check_count(messages)
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


class TemplateProcess:
    """Renders the chats of one model, one after the other; belongs to one event loop.

    A child that takes too much is ended, and another one is started for the next chat.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._first_line = _line([source, dict(special_tokens)])
        self._process: asyncio.subprocess.Process | None = None
        self._is_free = asyncio.Lock()

    async def start(self) -> None:
        async with self._is_free:
            await self._running()

    async def render(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt for the assistant's next message; both arguments are JSON."""
        line = _line([messages, extra])
        async with self._is_free:
            answer = await self._ask(line)
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        return answer["text"]

    async def _ask(self, line: bytes) -> dict[str, str]:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(line)
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise _refused(f"it takes more than {MAX_WAIT_S:g} s") from None
        finally:
            if not answer.endswith(b"\n"):
                await self.stop()
        if not answer.endswith(b"\n"):
            limit = f"{MAX_CPU_S:g} s of processor time or {MAX_MEMORY_BYTES >> 20} MiB"
            raise _refused(f"it takes more than {limit}")
        parsed: dict[str, str] = json.loads(answer)
        return parsed

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # Isolated and without site packages, which takes 50 ms; it only needs to find these.
            paths = [chat_template.__file__, jinja2.__file__, markupsafe.__file__]
            folders = [Path(paths[0]).parent, *(Path(path).parent.parent for path in paths[1:])]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _PROGRAM, *map(str, dict.fromkeys(folders))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_MEMORY_BYTES,  # of a line
                env={name: value for name, value in os.environ.items() if "NEO_DESKTOP" not in name},
                start_new_session=True,  # Ctrl-C is for the server
            )
            assert self._process.stdin is not None
            self._process.stdin.write(self._first_line)
        return self._process

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _refused(reason: str) -> ChatTemplateError:
    return ChatTemplateError(f"the model's chat template refused: {reason}")
