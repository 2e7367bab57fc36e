"""The keywords of JSON Schema, and the JSON types of values."""

import json
import re
from typing import Any, NamedTuple

from neo_desktop.engine.errors import SettingError

Json = dict[str, Any]
Schema = Json | bool

MOST = 2**31  # no output has more characters, items or properties
EXACT = 2.0**53  # llguidance's numbers are exact up to here

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
        *("maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    ),
}
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "not", "if", "then", "else")
CONSTRAINTS = frozenset(("type", "enum", "const", *IN_PLACE, *(k for ks in OF_TYPE.values() for k in ks)))
"""All constraining keywords; others are annotations, as is an unknown format."""

# Look-around, back references and word boundaries; anchors within a pattern.
_BEYOND = re.compile(
    r"\((?:\?[=!]|\?<[=!])|\\[1-9bBckAZz]|\\u\{|\{,|(?<!\\)\$(?![|)]|$)|(?<![|(\[\\])(?<!^)\^"
)


class SchemaError(SettingError):
    """An unsupported schema; the message names the path and the keyword."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__("grammar", f"cannot follow the schema: {path}: {problem}")
        self.path, self.problem = path, problem


class Unenforced(NamedTuple):
    """A constraint that an output may violate."""

    path: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.path}: {self.keyword!r} is not enforced"


def types_of(schema: Json) -> set[str] | None:
    """Return the types that a schema allows, with integers as numbers; None: unspecified."""
    values = values_of(schema)
    if values is not None:
        return {type_of(value) for value in values}
    types = schema.get("type", "object" if "properties" in schema else None)
    if types is None:
        return None
    names = set(types if isinstance(types, list) else [types])
    return {"number" if name == "integer" else name for name in names}


def values_of(schema: Json) -> list[Any] | None:
    """Return the values that a schema lists; None: no list."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def type_of(value: object) -> str:
    """Return the type of a value, "number" for integers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(one: object, two: object) -> bool:
    """Return True if two values are equal in JSON."""
    return one == two and isinstance(one, bool) == isinstance(two, bool)


def is_exact(value: object) -> bool:
    """Return True if llguidance writes exactly this value."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if isinstance(value, int | float):
        return abs(value) <= EXACT and (value == 0 or abs(value) >= 1e-6)
    return isinstance(value, dict | list) and all(
        map(is_exact, value.values() if isinstance(value, dict) else value)
    )


def step(name: str) -> str:
    """Return a member's part of a path."""
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name[:100])}]"


def is_known_pattern(pattern: str) -> bool:
    """Return True if llguidance supports all parts of a regular expression."""
    if _BEYOND.search(pattern):
        return False
    try:
        re.compile(re.sub(r"\\[pP]\{[^}]*\}", "x", pattern).replace("(?<", "(?P<"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True
