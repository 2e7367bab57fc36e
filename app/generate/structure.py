"""The form that an answer must have: JSON, a JSON schema, a regular expression or a grammar."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from llguidance.gbnf_to_lark import gbnf_to_lark

from neo_desktop.app.web.warnings import warn
from neo_desktop.engine import grammar
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.json_schema import Json, SchemaError

_CONTROL = re.compile(r"[\x7f-\x9f\u2028\u2029]")  # the others are escaped in JSON
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


Kind = Literal["json", "json_schema", "regex", "choice", "grammar"]
Source = Json | str | list[str]


@dataclass(frozen=True, slots=True)
class Structure:
    """One form, as a client asked for it in a field of the body."""

    field: str
    kind: Kind
    source: Source = ""
    is_strict: bool = False  # refused rather than enforced in part

    def schema(self) -> str:
        """JSON text of the enforceable schema, for `%json` in Lark."""
        source = {"type": "object"} if self.kind == "json" else self.source
        if self.kind not in ("json", "json_schema") or isinstance(source, list):
            raise ValueError("beside tools, the answer's form can only be JSON: leave the tools out")
        schema = enforced(source, "", self.is_strict)
        return grammar.json_rule(schema, whitespace_pattern=grammar.WHITE_SPACE)

    def grammar(self) -> str:
        """Return it as the engine enforces it, or raise ValueError."""
        if self.kind == "json":
            return grammar.any_json()
        if isinstance(self.source, list):
            if not self.source:
                raise ValueError("a choice needs at least one text")
            return grammar.from_lark(f"start: {' | '.join(map(in_lark, self.source))}")
        if self.kind == "json_schema":
            return grammar.from_enforceable(enforced(self.source, "", self.is_strict))
        assert isinstance(self.source, str)
        if self.kind == "regex":
            return grammar.from_regex(self.source)
        return grammar.from_lark(_lark(self.source))


@contextmanager
def enforcing(field: str) -> Iterator[None]:
    """Let a ValueError name the field that asks for a form."""
    try:
        yield
    except ValueError as error:
        raise SettingError(field, f"cannot be enforced: {error}") from error


def enforced(schema: Json | str, whose: str, is_strict: bool) -> Json:
    """Return the enforceable part of a schema; a warning names the rest, and `whose` schema it is."""
    where = f"{whose}, " if whose else ""
    try:
        found = grammar.parsed_schema(schema, is_strict=is_strict)
    except SchemaError as error:
        raise ValueError(f"{where}{error.path}: {error.problem}") from error
    except SettingError as error:
        raise ValueError(f"{where}{error.reason}") from error
    for one in found.unenforced:
        warn(f"schema of {whose or 'an answer'}, {one}")
    return found.schema


def in_lark(text: str) -> str:
    """Return a text as Lark writes it: as JSON does, with all control characters escaped."""
    written = json.dumps(text, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", written)


def _lark(source: str) -> str:
    """Translate llama.cpp's GBNF to Lark; Lark does not change."""
    if len(source) > grammar.MAX_GRAMMAR_CHARS:
        raise ValueError(f"it has more than {grammar.MAX_GRAMMAR_CHARS} characters: make it smaller")
    if _GBNF_RULE.search(source) is None:
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises any error
        raise ValueError(f"the GBNF cannot be read: {error}") from error
