"""JSON schemas as llguidance can follow them: what it lacks is expressed otherwise, or named.

The result holds for fewer values than the schema where that makes it enforceable: objects with `properties`
have no others, a schema with `properties` alone is one of objects. Constraints that cannot be expressed are
left out and listed. Drafts 4 to 2020-12 are read alike.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple
from urllib.parse import unquote

from neo_desktop.engine.errors import SettingError

Json = dict[str, Any]
Schema = Json | bool

MAX_DEPTH = 80
MAX_PARTS = 20_000
_MOST = 2**31  # no output has more of anything
_EXACT = 2.0**53  # up to here the library's numbers are exact

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OF_TYPE = {
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
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "not", "if", "then", "else")
_CONSTRAINTS = frozenset(("type", "enum", "const", *_IN_PLACE, *(k for ks in _OF_TYPE.values() for k in ks)))
"""All keywords that constrain; others are annotations, and so is an unknown format."""

_PAIRS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
# Look-around, back references and word boundaries; anchors within a pattern.
_BEYOND = re.compile(
    r"\((?:\?[=!]|\?<[=!])|\\[1-9bBckAZz]|\\u\{|\{,|(?<!\\)\$(?![|)]|$)|(?<![|(\[\\])(?<!^)\^"
)
_REFERENCE = re.compile(r'"(#/\$defs/d[0-9]+)"')
_ONE_OF_WORDS = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$")
_FINITE = re.compile(r"\^[^*+]*\$")


class SchemaError(SettingError):
    """A schema that cannot be followed; the message names the place and the keyword."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__("grammar", f"cannot follow the schema: {path}: {problem}")
        self.path, self.problem = path, problem


class Unenforced(NamedTuple):
    """A constraint that an output may break."""

    path: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.path}: {self.keyword!r} is not enforced"


@dataclass(slots=True)
class Enforceable:
    """A schema that llguidance can follow, and what it leaves out."""

    schema: Json
    unenforced: list[Unenforced] = field(default_factory=list)


def enforceable(schema: object, *, is_strict: bool = False) -> Enforceable:
    """Express a schema so that llguidance can follow it.

    Args:
        schema: parsed JSON.
        is_strict: refuse it rather than leave a constraint out.

    Raises:
        SchemaError: it is no schema, no value is valid, or a constraint would be left out.
    """
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        reason = "is no JSON: it nests too deeply, or holds numbers or text that JSON cannot hold"
        raise SchemaError("$", reason) from None
    walk = _Walk(schema)
    result = walk.visit(schema, "$", _Place())
    while walk.waiting:
        walk.waiting.pop()()
    if result is False:
        raise SchemaError(*walk.contradiction)
    found: Json = {} if result is True else result
    walk.keep_references_alone()
    if is_strict and walk.unenforced:
        path, keyword = walk.unenforced[0]
        raise SchemaError(path, f"{keyword!r} cannot be enforced: leave it out, or do not ask for strict")
    return Enforceable(found | ({"$defs": walk.definitions} if walk.definitions else {}), walk.unenforced)


class _Place(NamedTuple):
    """Where a schema stands."""

    depth: int = 0
    closes: bool = True  # objects with properties have no others
    infers: bool = True  # keywords for one type mean that type

    def inner(self) -> "_Place":
        return _Place(self.depth + 1)


class _Walk:
    """One pass over a schema."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.unenforced: list[Unenforced] = []
        self.definitions: dict[str, Schema] = {}
        self.waiting: list[Callable[[], None]] = []  # definitions that are named and not visited
        self.contradiction = ("$", "no value is valid")
        self._names: dict[tuple[int, bool, bool], str] = {}
        self._joined: list[tuple[Json, str]] = []  # schemas with a reference beside other constraints
        self._anchors = dict(_anchors(root))
        self._num_parts = 0

    def visit(self, schema: object, path: str, place: _Place) -> Schema:
        """Return the schema in the library's terms."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or place.depth > MAX_DEPTH:
            raise SchemaError(path, "the schema is too large or nests too deeply: make it smaller")
        if isinstance(schema, bool):
            return schema or self._never(path, "the schema is false")
        if not isinstance(schema, dict):
            raise SchemaError(path, "a schema must be an object or a boolean")
        given = {key: value for key, value in schema.items() if key in _CONSTRAINTS}
        out: Json = {}
        types = self._types(given, path, place)
        if types is not None:
            out["type"] = types[0] if len(types) == 1 else types
        for key in ("enum", "const"):
            if key in given:
                values = self._values(given[key], key, path)
                if values is not None:
                    out["enum"] = [
                        one for one in values if any(_same(one, two) for two in out.get("enum", [one]))
                    ]
        self._strings(given, out, path)
        self._numbers(given, out, path)
        self._arrays(given, out, path, place)
        self._objects(schema, given, out, path, place)
        self._in_place(given, out, path, place)
        problem = _contradiction(out)
        return out if problem is None else self._never(path, problem)

    def _never(self, path: str, problem: str) -> bool:
        self.contradiction = (path, f"{problem}, so that no value is valid")
        return False

    def _leave_out(self, path: str, keyword: str) -> None:
        self.unenforced.append(Unenforced(path, keyword))

    def _types(self, given: Json, path: str, place: _Place) -> list[str] | None:
        types = given.get("type")
        if types is None:
            is_alone = place.infers and not given.keys() & {"enum", "const", *_IN_PLACE}
            found = [name for name, keys in _OF_TYPE.items() if given.keys() & set(keys)]
            return found if is_alone and found else None
        names = types if isinstance(types, list) else [types]
        if not names or not all(name in _TYPES for name in names):
            raise SchemaError(
                path, f"'type' is {json.dumps(types)[:60]}, not one or several of {', '.join(_TYPES)}"
            )
        return list(dict.fromkeys(names))

    def _values(self, value: object, key: str, path: str) -> list[Any] | None:
        values = [value] if key == "const" else value
        if not isinstance(values, list):
            raise SchemaError(path, f"{key!r} must be a list")
        if all(map(_is_exact, values)):
            return values
        self._leave_out(path, key)
        return None

    def _strings(self, given: Json, out: Json, path: str) -> None:
        self._counts(given, out, path, "minLength", "maxLength")
        pattern, name = given.get("pattern"), given.get("format")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise SchemaError(path, "'pattern' must be text")
            if not _is_known_pattern(pattern):
                self._leave_out(path, "pattern")
            else:
                out["pattern"] = pattern
        if isinstance(name, str) and name in _FORMATS:
            out["format"] = name

    def _counts(self, given: Json, out: Json, path: str, *keys: str) -> None:
        for key in keys:
            value = given.get(key)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or value != int(value)
            ):
                raise SchemaError(path, f"{key!r} must be a whole number of at least 0")
            if value < _MOST:
                out[key] = int(value)
            elif key.startswith("min"):
                raise SchemaError(path, f"{key!r} is more than any output can have")

    def _numbers(self, given: Json, out: Json, path: str) -> None:
        for key in _OF_TYPE["number"]:
            value = given.get(key)
            if value is None or (key.startswith("exclusive") and value is False):
                continue
            if key.startswith("exclusive") and value is True:  # draft 4
                value = out.pop(f"m{key.removeprefix('exclusiveM')}", None)
                if value is None:
                    continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SchemaError(path, f"{key!r} must be a number")
            if key == "multipleOf" and value <= 0:
                raise SchemaError(path, "'multipleOf' must be more than 0")
            if _is_exact(value):
                out[key] = value
            else:
                self._leave_out(path, key)

    def _arrays(self, given: Json, out: Json, path: str, place: _Place) -> None:
        self._counts(given, out, path, "minItems", "maxItems")
        prefix, items = given.get("prefixItems"), given.get("items")
        if isinstance(items, list):  # before 2020-12
            prefix, items = (items, given.get("additionalItems")) if prefix is None else (prefix, None)
        if "unevaluatedItems" in given and items is None:
            if given.keys() & set(_IN_PLACE) or "contains" in given:
                if given["unevaluatedItems"] is not True:
                    self._leave_out(path, "unevaluatedItems")
            else:
                items = given["unevaluatedItems"]
        if prefix is not None:
            if not isinstance(prefix, list):
                raise SchemaError(path, "'prefixItems' must be a list")
            out["prefixItems"] = [
                self.visit(item, f"{path}.prefixItems[{i}]", place.inner()) for i, item in enumerate(prefix)
            ]
        if items is not None:
            out["items"] = self.visit(items, f"{path}.items", place.inner())
        if given.get("uniqueItems") and out.get("maxItems", 2) > 1:
            self._leave_out(path, "uniqueItems")
        if "contains" in given:
            low, high = given.get("minContains", 1), given.get("maxContains")
            if given["contains"] is True or given["contains"] == {}:
                self._counts({"minItems": max(low, out.get("minItems", 0))}, out, path, "minItems")
                low = 0
            if low != 0 or high is not None:
                self._leave_out(path, "contains")

    def _objects(self, schema: Json, given: Json, out: Json, path: str, place: _Place) -> None:
        self._counts(given, out, path, "minProperties", "maxProperties")
        required = given.get("required")
        if required is not None:
            if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
                raise SchemaError(path, "'required' must be a list of names")
            out["required"] = list(dict.fromkeys(required))
        for key, target in (("properties", "properties"), ("patternProperties", "patternProperties")):
            if key in given:
                if not isinstance(given[key], dict):
                    raise SchemaError(path, f"{key!r} must be an object")
                out[target] = {
                    name: self.visit(one, f"{path}.{key}{_step(name)}", place.inner())
                    for name, one in given[key].items()
                }
        additional = given.get("additionalProperties")
        unevaluated = given.get("unevaluatedProperties")
        names, is_closed, is_certain = _Group(self).of(schema)
        if additional is None and unevaluated is not None and unevaluated is not True:
            additional = unevaluated
            if not is_certain:
                self._leave_out(path, "unevaluatedProperties")
            self._add_names(out, names)
        elif (
            additional is None
            and place.closes
            and is_closed
            and given.keys() & {"properties", "allOf"}
            and names
        ):
            if out.get("minProperties", 0) <= len(names):
                additional = False
                self._add_names(out, names)
        if additional is not None:
            out["additionalProperties"] = self.visit(
                additional, f"{path}.additionalProperties", place.inner()
            )
        self._patterns(out, path)
        self._property_names(given, out, path)
        self._dependencies(given, out, path)
        self._property_counts(given, out, path)

    def _add_names(self, out: Json, names: list[str]) -> None:
        properties = out.setdefault("properties", {})
        for name in names:
            properties.setdefault(name, True)

    def _patterns(self, out: Json, path: str) -> None:
        """Name the properties of patterns that are words; let no two patterns meet."""
        given: dict[str, Schema] = out.pop("patternProperties", {})
        kept: dict[str, Schema] = {}
        properties = out.get("properties", {})
        for pattern, schema in given.items():
            words = _ONE_OF_WORDS.fullmatch(pattern)
            if words is not None:
                for name in (words[1] or words[2]).split("|"):
                    known = properties.get(name)
                    properties[name] = schema if known is None else {"allOf": [known, schema]}
            elif not _is_known_pattern(pattern) or (properties and _FINITE.fullmatch(pattern)):
                self._leave_out(path, "patternProperties")
            else:
                kept[pattern] = schema
        if properties:
            out["properties"] = properties
        if len(kept) > 1:
            schemas = [one for one in kept.values() if one is not True]
            kept = {"|".join(f"(?:{pattern})" for pattern in kept): {"allOf": schemas} if schemas else True}
        if kept:
            out["patternProperties"] = kept

    def _property_names(self, given: Json, out: Json, path: str) -> None:
        names = given.get("propertyNames")
        if names is None or names is True:
            return
        if names is False:
            out["maxProperties"] = 0
            return
        constraints = {key: value for key, value in names.items() if key in _CONSTRAINTS} if names else {}
        constraints.pop("format", None)
        if constraints.get("type") in ("string", ["string"]):
            del constraints["type"]
        is_map = not given.keys() & {"properties", "patternProperties", "required", *_IN_PLACE}
        allowed = out.get("additionalProperties", True)
        if not constraints:
            return
        pattern, words = constraints.get("pattern"), constraints.get("enum")
        if (
            is_map
            and constraints.keys() == {"pattern"}
            and isinstance(pattern, str)
            and _is_known_pattern(pattern)
        ):
            out |= {"patternProperties": {pattern: allowed}, "additionalProperties": False}
        elif is_map and constraints.keys() == {"enum"} and isinstance(words, list):
            texts = [word for word in words if isinstance(word, str)]
            out |= {"properties": dict.fromkeys(texts, allowed), "additionalProperties": False}
        else:
            self._leave_out(path, "propertyNames")

    def _dependencies(self, given: Json, out: Json, path: str) -> None:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            needed = given.get(key, {})
            if not isinstance(needed, dict):
                raise SchemaError(path, f"{key!r} must be an object")
            required = set(out.get("required", ()))
            if any(
                one is not True and not (isinstance(one, list) and required >= set(one))
                for one in needed.values()
            ):
                self._leave_out(path, key)

    def _property_counts(self, given: Json, out: Json, path: str) -> None:
        """Leave out counts that the library cannot keep beside optional properties, and those that hold."""
        properties, num_required = out.get("properties", {}), len(out.get("required", ()))
        is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if out.get("minProperties", 0) <= num_required:
            out.pop("minProperties", None)
        num_names = len(properties.keys() | set(out.get("required", ())))
        if is_closed and out.get("maxProperties", 0) >= num_names:
            out.pop("maxProperties", None)
        low, high = out.get("minProperties", 0) - num_required, out.get("maxProperties")
        high = None if high is None else high - num_required
        if not (low > 0 or high is not None) or (
            num_names == num_required and not given.keys() & set(_IN_PLACE)
        ):
            return
        if is_closed and low <= 1 and (high is None or high == 1) and not given.keys() & set(_IN_PLACE):
            return
        for key in ("minProperties", "maxProperties"):
            if out.pop(key, None) is not None:
                self._leave_out(path, key)

    def _in_place(self, given: Json, out: Json, path: str, place: _Place) -> None:
        has_own = bool(out.keys() - {"type"})
        inner = place._replace(
            depth=place.depth + 1,
            closes=place.closes and not has_own and "allOf" not in given,
            infers=place.infers and not out and "allOf" not in given,
        )
        parts: list[Schema] = []
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in given:
                target, where = self._resolved(given[key], key, path)
                parts.append({"$ref": self._definition(target, where, inner)})
        for key in ("anyOf", "oneOf"):
            if key in given:
                options = self._several(given[key], key, path, inner)
                if key == "oneOf" and not _Group(self).are_disjoint(given[key]):
                    self._leave_out(path, key)
                parts.append({"anyOf": options})
        if "allOf" in given:
            parts += self._several(given["allOf"], "allOf", path, inner._replace(closes=False, infers=False))
        if "not" in given and given["not"] is not False:
            if given["not"] is True or given["not"] == {}:
                parts.append(self._never(path, "'not' excludes everything"))
            else:
                self._leave_out(path, "not")
        if "if" in given and given.keys() & {"then", "else"}:
            if isinstance(given["if"], bool):
                then = given.get("then" if given["if"] else "else", True)
                parts.append(
                    self.visit(
                        then,
                        f"{path}.{'then' if given['if'] else 'else'}",
                        inner._replace(closes=False, infers=False),
                    )
                )
            else:
                self._leave_out(path, "if")
        has_reference = any(isinstance(part, dict) and "$ref" in part for part in parts)
        if len(parts) == 1 and isinstance(parts[0], dict):
            out |= parts[0]
        elif parts:
            out["allOf"] = parts
        if has_reference and len(parts) + len(out) > 2:
            self._joined.append((out, path))

    def keep_references_alone(self) -> None:
        """Leave out what stands beside a reference to a recursive schema: the library cannot join them."""
        for out, path in self._joined:
            for part in (out, *out.get("allOf", ())):
                if isinstance(part, dict) and "$ref" in part and self._is_recursive(part["$ref"]):
                    for key in sorted(out.keys() - {"$ref"}):
                        self._leave_out(path, key)
                    reference = part["$ref"]
                    out.clear()
                    out["$ref"] = reference
                    break

    def _is_recursive(self, reference: str) -> bool:
        seen, waiting = set[str](), [reference]
        while waiting:
            name = waiting.pop().rpartition("/")[2]
            text = json.dumps(self.definitions[name])
            found = set(_REFERENCE.findall(text)) - seen
            if reference in found:
                return True
            seen |= found
            waiting += found
        return False

    def _several(self, schemas: object, key: str, path: str, place: _Place) -> list[Schema]:
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(path, f"{key!r} must be a list of at least one schema")
        return [self.visit(one, f"{path}.{key}[{i}]", place) for i, one in enumerate(schemas)]

    def _definition(self, target: object, path: str, place: _Place) -> str:
        key = (id(target), place.closes, place.infers)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            self.definitions[name] = True

            def visit() -> None:
                self.definitions[name] = self.visit(target, path, place._replace(depth=0))

            self.waiting.append(visit)
        return f"#/$defs/{name}"

    def _resolved(self, reference: object, key: str, path: str) -> tuple[object, str]:
        if not isinstance(reference, str):
            raise SchemaError(path, f"{key!r} must be text")
        target = self.find(reference)
        if target is None:
            raise SchemaError(path, f"{key!r} refers to {reference[:100]!r}, which is not in the schema")
        return target[0], f"$({reference[:100]})"

    def find(self, reference: str) -> tuple[object] | None:
        """Return what a reference names; None: nothing within the schema."""
        base, _, fragment = reference.partition("#")
        found: object = self._anchors.get(base, self.root) if base else self.root
        if base and base not in self._anchors:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return (self._anchors[f"#{fragment}"],) if f"#{fragment}" in self._anchors else None
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return (found,)


class _Group:
    """The schemas that apply to one place: a schema, and those that it applies there in turn."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk

    def of(self, schema: Json) -> tuple[list[str], bool, bool]:
        """Return the names of its properties, False if a schema says which others it has, and False if only
        some of the schemas may hold."""
        names: dict[str, None] = {}
        is_plain, is_certain = True, True
        seen, waiting = set[int](), [schema]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            for key in ("properties", "required"):
                if isinstance(one.get(key), dict | list):
                    names |= dict.fromkeys(name for name in one[key] if isinstance(name, str))
            is_plain &= "additionalProperties" not in one and (
                one is schema or "unevaluatedProperties" not in one
            )
            is_certain &= not one.keys() & {
                "anyOf",
                "oneOf",
                "if",
                "dependentSchemas",
                "additionalProperties",
            }
            is_certain &= "patternProperties" not in one
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += one[key] if isinstance(one.get(key), list) else ()
            waiting += [one[key] for key in ("then", "else") if key in one]
            for key in ("dependentSchemas", "dependencies"):
                waiting += one[key].values() if isinstance(one.get(key), dict) else ()
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                found = self._walk.find(one[key]) if isinstance(one.get(key), str) else None
                waiting += found or ()
        return list(names), is_plain, is_certain

    def are_disjoint(self, schemas: list[object]) -> bool:
        """Return True if no value can be valid for two of them."""
        if len(schemas) > 64:
            return False
        return all(self._differ(one, two, 4) for i, one in enumerate(schemas) for two in schemas[:i])

    def _differ(self, one: object, two: object, depth: int) -> bool:
        one, two = self._target(one), self._target(two)
        if one is False or two is False:
            return True
        if depth == 0 or not isinstance(one, dict) or not isinstance(two, dict):
            return False
        types = [_types_of(each) for each in (one, two)]
        if types[0] is not None and types[1] is not None and not types[0] & types[1]:
            return True
        values = [_values_of(each) for each in (one, two)]
        if values[0] is not None and values[1] is not None:
            return not any(_same(first, second) for first in values[0] for second in values[1])
        if types != [{"object"}, {"object"}]:
            return False
        for name in [*one.get("required", ()), *two.get("required", ())]:
            members = [
                each.get("properties", {}).get(name, each.get("additionalProperties", True))
                for each in (one, two)
            ]
            if self._differ(*members, depth - 1):
                return True
        return False

    def _target(self, schema: object) -> object:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or len(schema) > 1:
                break
            found = self._walk.find(schema["$ref"])
            schema = found[0] if found else {}
        return schema


def _anchors(root: object) -> Iterator[tuple[str, object]]:
    """Yield `#anchor` and `$id` of all schemas, the outermost last."""
    waiting, found = [root], list[tuple[str, object]]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for key, prefix in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                if isinstance(one.get(key), str):
                    found.append((prefix + one[key].removesuffix("#"), one))
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    yield from reversed(found)


def _types_of(schema: Json) -> set[str] | None:
    values = _values_of(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    types = schema.get("type", "object" if "properties" in schema else None)
    if types is None:
        return None
    names = set(types if isinstance(types, list) else [types])
    return {"number" if name == "integer" else name for name in names}


def _values_of(schema: Json) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _same(one: object, two: object) -> bool:
    return one == two and isinstance(one, bool) == isinstance(two, bool)


def _is_exact(value: object) -> bool:
    """Return True if the library writes a value as it is."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if isinstance(value, int | float):
        return abs(value) <= _EXACT and (value == 0 or abs(value) >= 1e-6)
    return all(map(_is_exact, value.values() if isinstance(value, dict) else value))  # type: ignore[union-attr]


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name[:100])}]"


def _contradiction(out: Json) -> str | None:
    """Return why no value is valid; types that have none are left out."""
    types = out.get("type", _TYPES)
    types = [types] if isinstance(types, str) else list(types)
    if "enum" in out:
        known = {"number" if name == "integer" else name for name in types}
        out["enum"] = [value for value in out["enum"] if _type_of(value) in known]
        if not out["enum"]:
            return "'enum' has no value of the 'type'"
    problems = {name: _problem(name, out) for name in types}
    possible = [name for name in types if problems[name] is None]
    if not possible:
        return problems[types[-1]]
    if len(possible) < len(types):
        out["type"] = possible[0] if len(possible) == 1 else possible
    if False in out.get("allOf", ()):
        return "'allOf' holds a schema without a valid value"
    if "anyOf" in out and not any(option is not False for option in out["anyOf"]):
        return "'anyOf' holds no schema with a valid value"
    return None


def _problem(name: str, out: Json) -> str | None:
    """Return why no value of a type is valid."""
    match name:
        case "string" if out.get("minLength", 0) > out.get("maxLength", _MOST):
            return "'minLength' is more than 'maxLength'"
        case "integer" | "number" if _has_no_number(out, is_integer=name == "integer"):
            return "no number is within its bounds"
        case "array":
            low, num_first = out.get("minItems", 0), len(out.get("prefixItems", ()))
            if low > out.get("maxItems", _MOST):
                return "'minItems' is more than 'maxItems'"
            if (low > num_first and out.get("items") is False) or False in out.get("prefixItems", ())[:low]:
                return "an item that it must have has no valid value"
        case "object":
            properties, patterns = out.get("properties", {}), out.get("patternProperties", {})
            if out.get("minProperties", 0) > out.get("maxProperties", _MOST):
                return "'minProperties' is more than 'maxProperties'"
            for one in out.get("required", ()):
                is_known = one in properties or bool(patterns)
                if properties.get(one) is False or (
                    not is_known and out.get("additionalProperties") is False
                ):
                    return f"the required property {one!r} has no valid value"
            if len(out.get("required", ())) > out.get("maxProperties", _MOST):
                return "more properties are required than 'maxProperties'"
    return None


def _has_no_number(out: Json, *, is_integer: bool) -> bool:
    low = max((Fraction(out[key]) for key in ("minimum", "exclusiveMinimum") if key in out), default=None)
    high = min((Fraction(out[key]) for key in ("maximum", "exclusiveMaximum") if key in out), default=None)
    step = Fraction(str(out["multipleOf"])) if "multipleOf" in out else None
    if is_integer:
        step = Fraction(step.numerator) if step is not None else Fraction(1)
    if low is None or high is None:
        return False
    excluded = [Fraction(out[key]) for key in ("exclusiveMinimum", "exclusiveMaximum") if key in out]
    if step is None:
        return low > high or (low == high and low in excluded)
    first = math.ceil(low / step) * step
    return (first + step if first in excluded and first == low else first) > high or (
        first in excluded and first == high
    )


def _is_known_pattern(pattern: str) -> bool:
    """Return True if the library knows all that a regular expression consists of."""
    if _BEYOND.search(pattern):
        return False
    try:
        re.compile(re.sub(r"\\[pP]\{[^}]*\}", "x", pattern).replace("(?<", "(?P<"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True
