"""The form that an answer must have: JSON, a JSON schema, a regular expression or a grammar."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import Field

from neo_desktop.app.api.fields import HINT, Json, Label, Model
from neo_desktop.app.web.errors import ApiError
from neo_desktop.engine import grammar

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class JsonSchemaFormat(Model):
    """A JSON schema by name."""

    name: Label = None
    description: Label = None
    schema_: Json = Field(alias="schema")
    strict: Annotated[bool | None, HINT] = None  # the schema always holds


class ResponseFormat(Model):
    """OpenAI's `response_format`; llama.cpp puts the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Json | None = Field(default=None, alias="schema")


@dataclass(frozen=True, slots=True)
class Structure:
    """One form, as a client asked for it."""

    kind: Literal["json", "json_schema", "regex", "grammar"]
    source: Json | str = ""

    @classmethod
    def choice(cls, texts: list[str]) -> "Structure":
        """One of these texts."""
        if not texts:
            raise ApiError(400, "a choice needs at least one text", param="guided_choice")
        return cls("grammar", f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}")

    @classmethod
    def from_response_format(cls, form: ResponseFormat) -> "Structure | None":
        """What OpenAI's clients ask for; None: any text."""
        if form.schema_ is not None and form.json_schema is not None:
            message = "response_format has schema and json_schema: give one of them"
            raise ApiError(400, message, param="response_format")
        schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
        if form.type == "text" and schema is not None:
            message = "response_format has a schema, which its type text leaves out: use the type json_schema"
            raise ApiError(400, message, param="response_format")
        if form.type == "text":
            return None
        if schema is not None:
            return cls("json_schema", schema)
        if form.type == "json_schema":
            raise ApiError(400, "response_format needs json_schema.schema", param="response_format")
        return cls("json")

    def schema(self) -> str | None:
        """JSON text of the schema; None for other forms than JSON."""
        if self.kind == "json":
            return '{"type": "object"}'
        if self.kind != "json_schema":
            return None
        return json.dumps(json.loads(self.source) if isinstance(self.source, str) else self.source)

    def grammar(self) -> str:
        """Return it as the engine enforces it.

        Raises:
            ValueError: it cannot be enforced; the message says why.
        """
        if self.kind == "json":
            return grammar.any_json()
        if self.kind == "json_schema":
            return grammar.from_json_schema(self.source)
        assert isinstance(self.source, str)
        if self.kind == "regex":
            return grammar.from_regex(self.source)
        return grammar.from_lark(_lark(self.source))


def one_of(asked: Mapping[str, Structure]) -> tuple[str, Structure] | None:
    """The one form that was asked for, and in which field.

    Raises:
        ApiError: more than one was.
    """
    if len(asked) > 1:
        message = f"{' and '.join(asked)} each ask for a form of the answer: give one of them"
        raise ApiError(400, message, param=list(asked)[1])
    return next(iter(asked.items()), None)


def _lark(source: str) -> str:
    """llama.cpp's GBNF as Lark; Lark as it is."""
    if len(source) > grammar.MAX_GRAMMAR_CHARS:
        raise ValueError(f"it has more than {grammar.MAX_GRAMMAR_CHARS} characters: make it smaller")
    if _GBNF_RULE.search(source) is None:
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises whatever it likes
        raise ValueError(f"the GBNF cannot be read: {error}") from error
