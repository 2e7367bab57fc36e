"""A chat to the text that its model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_LOOP_TURNS = 5_000_000  # about a second; a real template takes a few per message
MAX_TEXT_CHARS = 1 << 26
_BUDGET = "loop budget"  # with a space: no template can name it


class ChatTemplateError(ValueError):
    """A chat that the template refuses, or a template that does not work."""


class ChatTemplate:
    """The Jinja template of a checkpoint, rendered as `transformers` does it.

    Templates come with downloaded models and are not trusted: they run in Jinja's sandbox, and their loops
    and their output are bounded.

    Args:
        source: Jinja source; None where the model has none.
        special_tokens: texts that the template may name, like "bos_token".
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for the assistant's next message; `extra` is for the template alone.

        Raises:
            ChatTemplateError: the model has no template, or it fails for these messages.
        """
        context = self._special_tokens | dict(extra or {})
        context |= {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        context[_BUDGET] = _LoopBudget(MAX_LOOP_TURNS)
        pieces = []
        room_chars = MAX_TEXT_CHARS
        try:
            for piece in self._template.generate(context):
                room_chars -= len(piece)
                if room_chars < 0:
                    raise ChatTemplateError(f"the text exceeds {MAX_TEXT_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # a template can raise anything, like any program
            raise ChatTemplateError(f"the model's chat template refused: {error}") from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise ChatTemplateError("the model has no chat template: use /v1/completions instead")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters |= {"tojson": _tojson, "_counted": _counted}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        tree = environment.parse(self._source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        return environment.from_string(tree)


class _LoopBudget:
    """Turns of all loops together that a rendering may still take."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    def take(self, num_turns: int) -> None:
        self._num_turns -= num_turns
        if self._num_turns < 0:
            raise ChatTemplateError(f"it loops more than {MAX_LOOP_TURNS} times")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, values: Any) -> list[Any]:
    """What a loop runs over, once the budget has paid for it."""
    items = list(values)
    context.resolve(_BUDGET).take(len(items))
    return items


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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
