"""JSON schemas as llguidance takes them: what it cannot enforce is left out and listed.

llguidance itself translates the schema, and refuses one without valid values. The result may accept fewer
values than the schema: an object with `properties` has no others, and a schema with only `properties` is one
of objects. If schemas apply to the same value, as in `allOf`, objects stay open: each may name properties.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from neo_desktop.engine.errors import SettingError

Json = dict[str, Any]
Schema = Json | bool

MAX_DEPTH, MAX_PARTS = 80, 20_000
MOST = 2**31  # no output has more characters, items or properties

OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
        *("maxProperties", "propertyNames", "dependentRequired", "unevaluatedProperties"),
    },
}
COUNTS = {f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties")}
LISTS = {"prefixItems", "allOf", "anyOf", "oneOf"}
IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "not", "if"}
OWN = {"type", "enum", "const"}.union(*OF_TYPE.values())

# Keywords that llguidance cannot enforce, and their values without effect.
UNENFORCED: dict[str, tuple[object, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("if", "contains", "$dynamicRef", "$recursiveRef"), ()),
}
DROPPED = {*UNENFORCED, "then", "else", "minContains", "maxContains", "additionalItems", "x-guidance"}

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


class Enforceable(NamedTuple):
    """A schema for llguidance, and the constraints that it leaves out."""

    schema: Json
    unenforced: list[Unenforced]


def enforceable(schema: object, *, is_strict: bool = False) -> Enforceable:
    """Return the enforceable form of a schema, which is parsed JSON.

    Args:
        is_strict: reject the schema instead of leaving a constraint out.

    Raises:
        SchemaError: it is not a schema, or a constraint would be left out.
    """
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        reason = (
            "is not valid JSON: it nests too deeply, or contains numbers or text that JSON cannot represent"
        )
        raise SchemaError("$", reason) from None
    if schema is False:
        raise SchemaError("$", "the schema is false, so no value is valid")
    translation = _Translation(schema)
    result = translation.visit(schema, "$")
    if is_strict and translation.unenforced:
        path, keyword = translation.unenforced[0]
        raise SchemaError(path, f"{keyword!r} cannot be enforced: remove it, or turn strict off")
    return Enforceable(result if isinstance(result, dict) else {}, translation.unenforced)


class _Translation:
    """The translation of one schema."""

    def __init__(self, root: object) -> None:
        self.unenforced: list[Unenforced] = []
        self._root = root
        objects = list(_objects(root))
        if len(objects) > MAX_PARTS:
            raise SchemaError("$", "the schema is too large: make it smaller")
        self._anchors = {f"#{each['$anchor']}": each for each in objects if "$anchor" in each}
        self._referenced = {id(self._found(each["$ref"])) for each in objects if "$ref" in each}
        joins = [parts for each in objects if len(parts := _in_place(each)) + bool(each.keys() & OWN) > 1]
        self._infers = not joins  # a schema for one type allows no other type
        self._closes = not any(map(_has_names, chain(*chain(*joins))))  # objects have no unnamed properties

    def _found(self, reference: object) -> object:
        """Return the target of a JSON pointer or an anchor; an empty schema if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return {}
        if not reference.startswith("#/"):
            return self._anchors.get(reference, self._root if reference == "#" else {})
        target = self._root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = dict(enumerate(target)).get(int(name) if name.isdecimal() else -1)
            else:
                target = _dict(target).get(name)
        return target

    def _target(self, schema: object) -> object:
        """Follow references within the schema."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._found(schema["$ref"])
        return schema

    def visit(self, schema: object, path: str, depth: int = 0) -> Schema:
        if depth > MAX_DEPTH:
            raise SchemaError(path, "the schema nests too deeply: make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(path, "a schema must be an object or a boolean")
        out = {key: value for key, value in schema.items() if key not in DROPPED}
        if isinstance(out.get("items"), list):  # before 2020-12
            out["prefixItems"] = out.pop("items")
            out |= {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
        self._leave_out(schema, out, path)
        if self._infers and not out.keys() & {"type", "enum", "const", *IN_PLACE}:
            implied = [name for name, keywords in OF_TYPE.items() if schema.keys() & keywords]
            out |= {"type": implied} if implied else {}
        if self._closes and not out.keys() & {"additionalProperties", "patternProperties"}:
            _close(out)
        for key in out.keys() & {"properties", "patternProperties", "$defs", "definitions"}:
            if not isinstance(out[key], dict):
                raise SchemaError(path, f"{key!r} must be an object")
            is_definition = key in ("$defs", "definitions")
            out[key] = {
                name: self.visit(one, f"{path}.{key}{_step(name)}", depth + 1)
                for name, one in out[key].items()
                if not is_definition or any(id(inner) in self._referenced for inner in _objects(one))
            }
        for key in out.keys() & {"items", "additionalProperties", *LISTS}:
            if not isinstance(out[key], list):
                out[key] = self.visit(out[key], f"{path}.{key}", depth + 1)
            else:
                out[key] = [
                    self.visit(one, f"{path}.{key}[{i}]", depth + 1) for i, one in enumerate(out[key])
                ]
        return out

    def _leave_out(self, schema: Json, out: Json, path: str) -> None:
        """Express or drop what llguidance cannot enforce, and list what is dropped."""
        left = {key for key, harmless in UNENFORCED.items() if key in schema and schema[key] not in harmless}
        if not schema.keys() & {"then", "else"}:
            left.discard("if")
        if not schema.keys() & IN_PLACE:
            left -= _express(schema, out)
        for key in out.keys() & COUNTS:
            out[key] = _count(out[key], key, path)
        if out.get("minProperties", 0) <= len(_list(out.get("required"))):
            out.pop("minProperties", None)
        left |= {key for key in ("minProperties", "maxProperties") if key in out and not _can_count(out)}
        if not _is_known_pattern(out.get("pattern", "")):
            left.add("pattern")
        for key in left & {"minProperties", "maxProperties", "pattern"}:
            del out[key]
        patterns = _dict(out.get("patternProperties"))
        if unknown := [each for each in patterns if not _is_known_pattern(each)]:
            out["patternProperties"] = {each: patterns[each] for each in patterns if each not in unknown}
            left.add("patternProperties")
        if "oneOf" in out and not self._are_disjoint(_list(out["oneOf"])):
            left.add("oneOf")
        self.unenforced += [Unenforced(path, key) for key in schema if key in left]

    def _are_disjoint(self, schemas: list[object]) -> bool:
        """Return True if no value can be valid for two schemas."""
        few = len(schemas) <= 64
        return few and all(self._differ(one, two, 4) for i, one in enumerate(schemas) for two in schemas[:i])

    def _differ(self, one: object, two: object, depth: int) -> bool:
        one, two = self._target(one), self._target(two)
        if depth == 0 or not isinstance(one, dict) or not isinstance(two, dict):
            return one is False or two is False
        types = _types(one), _types(two)
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        values = _values(one), _values(two)
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        return types == ({"object"}, {"object"}) and any(
            self._differ(
                _dict(one.get("properties")).get(name), _dict(two.get("properties")).get(name), depth - 1
            )
            for name in _list(one.get("required"))
            if name in _list(two.get("required"))
        )


def _objects(root: object) -> Iterator[Json]:
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _in_place(schema: Json) -> list[list[object]]:
    """Return the schemas that apply to the same value, alternatives together."""
    groups = [[part] for part in _list(schema.get("allOf"))]
    groups += [_list(schema[key]) for key in ("anyOf", "oneOf") if key in schema]
    return groups + ([[{"$ref": schema["$ref"]}]] if "$ref" in schema else [])


def _has_names(schema: object) -> bool:
    """Return True if a schema may name properties."""
    names = {"properties", "patternProperties", "additionalProperties", *IN_PLACE}
    return isinstance(schema, dict) and bool(schema.keys() & names)


def _close(out: Json) -> None:
    """Allow no properties but the named ones, if there are enough."""
    if not isinstance(out.get("properties"), dict):
        return
    names = {*out["properties"], *_list(out.get("required"))}
    if out.get("minProperties", 0) <= len(names):
        out["properties"] = dict.fromkeys(_list(out.get("required")), True) | out["properties"]
        out["additionalProperties"] = False


def _express(schema: Json, out: Json) -> set[str]:
    """Add the equivalents of some keywords; return these keywords."""
    done = set[str]()
    for key, own in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
        if key in schema and not (key == "unevaluatedItems" and "contains" in schema):
            out.setdefault(own, schema[key])
            done.add(key)
    names, others = schema.get("propertyNames"), out.get("additionalProperties", True)
    if schema.keys() & {"properties", "patternProperties", "required"} or not isinstance(names, dict):
        return done
    match {key: value for key, value in names.items() if (key, value) != ("type", "string")}:
        case {"pattern": str(pattern), **rest} if not rest and _is_known_pattern(pattern):
            out |= {"patternProperties": {pattern: others}, "additionalProperties": False}
        case {"enum": list(words), **rest} if not rest:
            properties = {word: others for word in words if isinstance(word, str)}
            out |= {"properties": properties, "additionalProperties": False}
        case _:
            return done
    return done | {"propertyNames"}


def _count(value: object, key: str, path: str) -> int:
    """Return a count of characters, items or properties; more than `MOST` are as good as `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError(path, f"{key!r} must be a whole number of at least 0")
    if value >= MOST and key.startswith("min"):
        raise SchemaError(path, f"{key!r} exceeds every possible output")
    return int(min(value, MOST))


def _can_count(out: Json) -> bool:
    """Return True if llguidance can count properties: all are required, or one of a closed object's is."""
    if out.keys() & IN_PLACE:
        return False
    if _list(out.get("required")):
        return _dict(out.get("properties")).keys() <= {*out["required"]}
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    return "properties" not in out or (
        is_closed and out.get("minProperties", 0) <= 1 and out.get("maxProperties", 1) == 1
    )


def _is_known_pattern(pattern: object) -> bool:
    """Return True if llguidance supports all parts of a regular expression; it refuses what is no text."""
    if not isinstance(pattern, str):
        return True
    if _BEYOND.search(pattern):
        return False
    try:
        re.compile(re.sub(r"\\[pP]\{[^}]*\}", "x", pattern).replace("(?<", "(?P<"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _types(schema: Json) -> set[str]:
    """Return the types that a schema allows, with integers as numbers; empty: unknown."""
    implied = "object" if "properties" in schema else []
    types = schema.get("type", implied)
    return {
        "number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)
    }


def _values(schema: Json) -> set[str] | None:
    """Return the values that a schema lists, as text; None: no list."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _step(name: str) -> str:
    """Return a member's part of a path."""
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name[:100])}]"
