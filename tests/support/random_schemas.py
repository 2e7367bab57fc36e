"""Random JSON schemas with every keyword of draft 2020-12 and draft 7, and JSON from their grammars."""

import random
from collections.abc import Callable
from typing import Any

from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.models.tokenizer import ByteTokenizer

NAMES = ("a", "name", "x-1", "a b", 'q"', "ünï", "$ref", "", "tags")
PATTERNS = (
    *(
        "^[a-z]{2,4}$",
        "^x-",
        "[0-9]",
        r"^\d{3}-\d{4}$",
        "^(red|green)$",
        "^a$",
        ".*",
        "^.{1,3}$",
        "a|b",
        r"^\S+$",
    ),
    *("^(?!a)b", r"\bfoo\b", r"(a)\1", "(?<=x)y", r"^\p{L}+$", "^a$b", "[[", r"\u0041+", r"\cA", "x$|^y"),
)
FORMATS = (
    *("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"),
    *("password", "binary", "color", "json-pointer", "regex", "int32", "path"),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -3,
        2.5,
        1.0,
        10**20,
        1e-9,
        "",
        "a",
        'b"\\',
        "ünï",
        "\x00\x1f",
        "a\nb",
        [],
        {},
    ),
    *([1, "x"], {"k": [None]}, {"a": 1, "b": {"c": []}}),
)
ANNOTATIONS: dict[str, Any] = {
    "title": "t",
    "description": "d",
    "default": None,
    "examples": [1],
    "deprecated": True,
    "readOnly": True,
    "writeOnly": False,
    "$comment": "c",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$vocabulary": {},
    "discriminator": {"propertyName": "a"},
    "nullable": True,
    "x-own": [1],
    "x-guidance": {"whitespace_flexible": True},
}
Keyword = Callable[[], Any]


class SchemaMaker:
    """Generator of schemas; equal seeds give equal schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Any:
        """Return a whole schema, with definitions."""
        made = self._schema(3)
        if isinstance(made, dict):
            made["$defs"] = {"one": self._schema(1), "two": self._schema(2)}
            made["definitions"] = {"one": self._schema(1)}
            if isinstance(made["$defs"]["two"], dict):
                made["$defs"]["two"] |= {"$anchor": "two", "$dynamicAnchor": "dyn"}
        return made

    def _schema(self, depth: int) -> Any:
        if self._draws(0.08):
            return self._random.choice([True, True, False, {}])
        kind = self._random.choice(["string", "number", *(["array", "object", "object"] * (depth > 0))])
        keywords = getattr(self, f"_{kind}")(depth - 1)
        names = self._random.sample(list(keywords), self._random.randint(1, 3))
        if kind == "object" and self._draws(0.7):
            names = list(dict.fromkeys(["properties", "required", *names]))
        if self._draws(0.3) and depth > 0:
            keywords |= self._anywhere(depth - 1)
            names.append(self._random.choice(list(self._anywhere(0))))
            names += ["if"] * (names[-1] in ("then", "else"))
        made = {name: keywords[name]() for name in names}
        if self._draws(0.75):
            made["type"] = self._random.choice([kind, kind, kind, [kind, "null"]])
            if kind == "number" and self._draws(0.5):
                made["type"] = "integer"
        if self._draws(0.2):
            made |= [self._random.choice(list(ANNOTATIONS.items()))]
        return made

    def _draws(self, probability: float) -> bool:
        return self._random.random() < probability

    def _several(self, depth: int) -> list[Any]:
        return [self._schema(depth) for _ in range(self._random.randint(1, 3))]

    def _names(self, count: int) -> list[str]:
        return self._random.sample(NAMES, count)

    def _one_of(self, *values: Any) -> Keyword:
        return lambda: self._random.choice(values)

    def _string(self, depth: int) -> dict[str, Keyword]:
        return {
            "minLength": self._one_of(0, 1, 2, 3.0),
            "maxLength": self._one_of(0, 2, 4, 12, 10**12),
            "pattern": self._one_of(*PATTERNS),
            "format": self._one_of(*FORMATS),
            "contentEncoding": self._one_of("base64"),
            "contentMediaType": self._one_of("text/plain"),
            "contentSchema": self._one_of(True, {"type": "object"}),
        }

    def _number(self, depth: int) -> dict[str, Keyword]:
        return {
            "minimum": self._one_of(-1000, -1.5, 0, 0.5, 7, 10**30),
            "exclusiveMinimum": self._one_of(-3, 0, 0.25),
            "maximum": self._one_of(0, 1, 7, 7.25, 100),
            "exclusiveMaximum": self._one_of(1, 8, 7.25, 100),
            "multipleOf": self._one_of(1, 2, 7, 0.5, 0.01),
        }

    def _array(self, depth: int) -> dict[str, Keyword]:
        return {
            "items": lambda: self._schema(depth),
            "prefixItems": lambda: self._several(depth),
            "additionalItems": lambda: self._schema(depth),
            "minItems": self._one_of(0, 1, 2, 3),
            "maxItems": self._one_of(0, 1, 2, 5),
            "uniqueItems": self._one_of(True, True, False),
            "contains": lambda: self._schema(depth),
            "minContains": self._one_of(0, 1, 2),
            "maxContains": self._one_of(1, 2),
            "unevaluatedItems": lambda: self._schema(depth),
        }

    def _object(self, depth: int) -> dict[str, Keyword]:
        return {
            "properties": lambda: {name: self._schema(depth) for name in self._names(3)},
            "required": lambda: self._names(self._random.randint(0, 2)),
            "additionalProperties": lambda: self._random.choice([False, False, True, self._schema(depth)]),
            "patternProperties": lambda: {
                pattern: self._schema(depth) for pattern in self._random.sample(PATTERNS, 2)
            },
            "minProperties": self._one_of(0, 1, 2, 4),
            "maxProperties": self._one_of(0, 1, 2, 4),
            "propertyNames": self._one_of(
                {"pattern": "^[a-z]+$"}, {"maxLength": 3}, {"enum": ["a", "b"]}, True, {"type": "string"}
            ),
            "dependentRequired": lambda: {self._names(1)[0]: self._names(1)},
            "dependentSchemas": lambda: {self._names(1)[0]: self._schema(depth)},
            "dependencies": lambda: {self._names(1)[0]: self._names(1)},
            "unevaluatedProperties": lambda: self._random.choice([False, self._schema(depth)]),
        }

    def _anywhere(self, depth: int) -> dict[str, Keyword]:
        references = ("#/$defs/one", "#/$defs/two", "#/definitions/one", "#", "#two", "#/properties/a")
        return {
            "enum": lambda: self._random.sample(VALUES, self._random.randint(0, 4)),
            "const": self._one_of(*VALUES),
            "allOf": lambda: self._several(depth),
            "anyOf": lambda: self._several(depth),
            "oneOf": lambda: self._several(depth),
            "not": lambda: self._schema(depth),
            "if": lambda: self._schema(depth),
            "then": lambda: self._schema(depth),
            "else": lambda: self._schema(depth),
            "$ref": self._one_of(*references),
            "$dynamicRef": self._one_of("#dyn"),
            "$recursiveRef": self._one_of("#"),
        }


class Walker:
    """Draws texts of a grammar, byte by byte."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.compiler = GrammarCompiler(self.tokenizer, 257, (256,))

    def text(self, grammar: str, seed: int, most: int = 9000) -> str | None:
        """Return a whole text, or None if it does not end; after 300 bytes it prefers an early end.

        Raises:
            SettingError: the grammar is refused.
            RuntimeError: the grammar leads to no end.
        """
        state, drawing, written = self.compiler.start(grammar), random.Random(seed), bytearray()
        while not state.is_complete and len(written) < most:
            bits = state.allowed_tokens()
            allowed = [i for i in range(257) if bits[i // 8] >> i % 8 & 1]
            chosen = drawing.choice(allowed)
            hurry = [ord(char) for char in '"}]0' if ord(char) in allowed]
            is_late = len(written) > 300 or drawing.random() < 0.3
            if hurry and is_late and drawing.random() < 0.9:
                chosen = drawing.choice(hurry)
            if 256 in allowed and (is_late or chosen == 256):
                break
            if not state.accept(chosen):
                raise RuntimeError(f"{state.error} after {bytes(written)!r}")
            written.append(chosen)
        return written.decode() if len(written) < most else None
