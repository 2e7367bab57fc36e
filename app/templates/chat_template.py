"""A chat to the text that its model was trained on.

This file also is the program of a process of its own, see chat_templates.py: it imports nothing of ours, so
that it starts in an instant.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT_CHARS = 1 << 26
MAX_CPU_S = 1.0  # a real template takes milliseconds
MAX_MEMORY_BYTES = 512 << 20  # address space, and so everything


class ChatTemplateError(ValueError):
    """A chat that the template refuses, or a template that does not work."""


class ChatTemplate:
    """The Jinja template of a checkpoint, rendered as `transformers` does it.

    It runs in Jinja's sandbox: it reaches no files and no objects but its own. Its time and memory are not
    bounded here; templates that come with downloaded models belong into a `TemplateProcess`. It may name the
    special tokens, like "bos_token"; a model without template has no source.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for the assistant's next message; `extra` is for the template alone."""
        context: dict[str, Any] = self._special_tokens | {"tools": None, "documents": None}
        context |= {"add_generation_prompt": True} | dict(extra or {}) | {"messages": messages}
        try:
            text = self._template.render(context)
            if len(text) > MAX_TEXT_CHARS:
                raise ValueError(f"the text exceeds {MAX_TEXT_CHARS} characters")
            return text
        except ChatTemplateError:
            raise
        except MemoryError:
            raise ChatTemplateError("the model's chat template refused: it needs too much memory") from None
        except Exception as error:  # a template can raise anything, like any program
            raise ChatTemplateError(f"the model's chat template refused: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise ChatTemplateError("the model has no chat template: use /v1/completions instead")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own would escape HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# From here on: the process. Lines of JSON come in and go out; the first one says which template it is.


def main() -> None:
    """Answer [messages, extra] with {"text": …} or {"error": …} until stdin ends."""
    with contextlib.suppress(ValueError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    template = ChatTemplate(*json.loads(sys.stdin.buffer.readline() or "[null, {}]"))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # the signal has no handler: it ends this process
        try:
            answer = {"text": template.render(*json.loads(line))}
        except ChatTemplateError as error:
            answer = {"error": str(error)}
        written = json.dumps(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(written, flush=True)
