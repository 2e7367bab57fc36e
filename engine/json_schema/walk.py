"""JSON schemas in a form that llguidance can follow: unsupported keywords are rewritten or reported.

The result may accept fewer values than the schema, to make it enforceable: objects with `properties` have no
others, and a schema with only `properties` is one of objects. Constraints without an equivalent are left out
and listed. Drafts 4 to 2020-12 are treated alike.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neo_desktop.engine.json_schema.document import Document
from neo_desktop.engine.json_schema.endings import Endings
from neo_desktop.engine.json_schema.limits import contradiction
from neo_desktop.engine.json_schema.objects import Objects
from neo_desktop.engine.json_schema.words import (
    CONSTRAINTS,
    FORMATS,
    IN_PLACE,
    MOST,
    OF_TYPE,
    TYPES,
    Json,
    Schema,
    SchemaError,
    Unenforced,
    is_exact,
    is_known_pattern,
    same,
)

MAX_DEPTH = 80
MAX_PARTS = 20_000


@dataclass(slots=True)
class Enforceable:
    """A schema that llguidance can follow, and the constraints that it leaves out."""

    schema: Json
    unenforced: list[Unenforced] = field(default_factory=list)


def enforceable(schema: object, *, is_strict: bool = False) -> Enforceable:
    """Express a schema in llguidance's terms.

    Args:
        schema: parsed JSON.
        is_strict: reject the schema instead of leaving a constraint out.

    Raises:
        SchemaError: it is not a schema, no value is valid, or a constraint would be left out.
    """
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        reason = (
            "is not valid JSON: it nests too deeply, or contains numbers or text that JSON cannot represent"
        )
        raise SchemaError("$", reason) from None
    walk = Walk(schema)
    result = walk.visit(schema, "$", Place())
    while walk.waiting:
        walk.waiting.pop()()
    if result is False:
        raise SchemaError(*walk.contradiction)
    endings = Endings(walk.definitions)
    for out, where in walk.joined:
        for key in endings.keep_reference(out):
            walk.leave_out(where, key)
    result = endings.without_endless(result)
    if result is False:
        raise SchemaError("$", "it refers to itself endlessly, so no value is valid")
    if is_strict and walk.unenforced:
        path, keyword = walk.unenforced[0]
        raise SchemaError(path, f"{keyword!r} cannot be enforced: remove it, or turn strict off")
    enforced: Json = {} if result is True else result
    return Enforceable(
        enforced | ({"$defs": endings.definitions} if endings.definitions else {}), walk.unenforced
    )


class Place(NamedTuple):
    """Context of a schema."""

    depth: int = 0
    closes: bool = True  # objects with properties have no others
    infers: bool = True  # keywords for one type imply that type

    def inner(self) -> "Place":
        """Return the context of an item or a property."""
        return Place(self.depth + 1)


class Walk:
    """One pass over a schema."""

    def __init__(self, root: object) -> None:
        self.document = Document(root)
        self.unenforced: list[Unenforced] = []
        self.definitions: dict[str, Schema] = {}
        self.waiting: list[Callable[[], None]] = []  # referenced definitions, not visited yet
        self.contradiction = ("$", "no value is valid")
        self._names: dict[tuple[int, bool, bool], str] = {}
        self.joined: list[tuple[Json, str]] = []  # schemas with a reference beside other constraints
        self._num_parts = 0

    def visit(self, schema: object, path: str, place: Place) -> Schema:
        """Return the schema in llguidance's terms."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or place.depth > MAX_DEPTH:
            raise SchemaError(path, "the schema is too large or nests too deeply: make it smaller")
        if isinstance(schema, bool):
            return schema or self._never(path, "the schema is false")
        if not isinstance(schema, dict):
            raise SchemaError(path, "a schema must be an object or a boolean")
        given = {key: value for key, value in schema.items() if key in CONSTRAINTS}
        out: Json = {}
        types = self._types(given, path, place)
        if types is not None:
            out["type"] = types[0] if len(types) == 1 else types
        for key in ("enum", "const"):
            if key in given:
                values = self._values(given[key], key, path)
                if values is not None:
                    out["enum"] = [
                        one for one in values if any(same(one, two) for two in out.get("enum", [one]))
                    ]
        self._strings(given, out, path)
        self._numbers(given, out, path)
        self._arrays(given, out, path, place)
        Objects(self, given, out, path).express(schema, place)
        self._in_place(given, out, path, place)
        problem = contradiction(out)
        if problem:
            self._never(path, problem)
        return out if problem is None else False

    def _never(self, path: str, problem: str) -> bool:
        self.contradiction = (path, f"{problem}, so no value is valid")
        return False

    def leave_out(self, path: str, keyword: str) -> None:
        """Record a constraint that an output may violate."""
        self.unenforced.append(Unenforced(path, keyword))

    def _types(self, given: Json, path: str, place: Place) -> list[str] | None:
        types = given.get("type")
        if types is None:
            is_alone = place.infers and not given.keys() & {"enum", "const", *IN_PLACE}
            implied = [name for name, keys in OF_TYPE.items() if given.keys() & set(keys)]
            return implied if is_alone and implied else None
        names = types if isinstance(types, list) else [types]
        if not names or not all(name in TYPES for name in names):
            raise SchemaError(
                path, f"'type' is {json.dumps(types)[:60]}, not one or several of {', '.join(TYPES)}"
            )
        return list(dict.fromkeys(names))

    def _values(self, value: object, key: str, path: str) -> list[Any] | None:
        values = [value] if key == "const" else value
        if not isinstance(values, list):
            raise SchemaError(path, f"{key!r} must be a list")
        if all(map(is_exact, values)):
            return values
        self.leave_out(path, key)
        return None

    def _strings(self, given: Json, out: Json, path: str) -> None:
        self.counts(given, out, path, "minLength", "maxLength")
        pattern, name = given.get("pattern"), given.get("format")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise SchemaError(path, "'pattern' must be text")
            if not is_known_pattern(pattern):
                self.leave_out(path, "pattern")
            else:
                out["pattern"] = pattern
        if isinstance(name, str) and name in FORMATS:
            out["format"] = name

    def counts(self, given: Json, out: Json, path: str, *keys: str) -> None:
        """Copy limits on the number of characters, items or properties."""
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
            if value < MOST:
                out[key] = int(value)
            elif key.startswith("min"):
                raise SchemaError(path, f"{key!r} exceeds every possible output")

    def _numbers(self, given: Json, out: Json, path: str) -> None:
        for key in OF_TYPE["number"]:
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
            if is_exact(value):
                out[key] = value
            else:
                self.leave_out(path, key)

    def _arrays(self, given: Json, out: Json, path: str, place: Place) -> None:
        self.counts(given, out, path, "minItems", "maxItems")
        prefix, items = given.get("prefixItems"), given.get("items")
        if isinstance(items, list):  # before 2020-12
            prefix, items = (items, given.get("additionalItems")) if prefix is None else (prefix, None)
        if "unevaluatedItems" in given and items is None:
            if given.keys() & set(IN_PLACE) or "contains" in given:
                if given["unevaluatedItems"] is not True:
                    self.leave_out(path, "unevaluatedItems")
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
            self.leave_out(path, "uniqueItems")
        if "contains" in given:
            low, high = given.get("minContains", 1), given.get("maxContains")
            if given["contains"] is True or given["contains"] == {}:
                self.counts({"minItems": max(low, out.get("minItems", 0))}, out, path, "minItems")
                low = 0
            if low != 0 or high is not None:
                self.leave_out(path, "contains")

    def _in_place(self, given: Json, out: Json, path: str, place: Place) -> None:
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
                parts.append({"anyOf": self._several(given[key], key, path, inner)})
        if "oneOf" in given and not self.document.are_disjoint(given["oneOf"]):
            self.leave_out(path, "oneOf")
        within = inner._replace(closes=False, infers=False)
        if "allOf" in given:
            parts += self._several(given["allOf"], "allOf", path, within)
        parts += self._conditions(given, path, within)
        has_reference = any(isinstance(part, dict) and "$ref" in part for part in parts)
        if len(parts) == 1 and isinstance(parts[0], dict):
            out |= parts[0]
        elif parts:
            out["allOf"] = parts
        if has_reference and len(parts) + len(out) > 2:
            self.joined.append((out, path))

    def _conditions(self, given: Json, path: str, place: Place) -> list[Schema]:
        """Return the schemas for `not` and `if` where they are decidable; leave them out elsewhere."""
        parts: list[Schema] = []
        excluded, condition = given.get("not", False), given.get("if")
        if excluded is True or excluded == {}:
            parts.append(self._never(path, "'not' excludes everything"))
        elif excluded is not False:
            self.leave_out(path, "not")
        if isinstance(condition, bool):
            key = "then" if condition else "else"
            parts.append(self.visit(given.get(key, True), f"{path}.{key}", place))
        elif condition is not None and given.keys() & {"then", "else"}:
            self.leave_out(path, "if")
        return parts

    def _several(self, schemas: object, key: str, path: str, place: Place) -> list[Schema]:
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(path, f"{key!r} must be a list of at least one schema")
        return [self.visit(one, f"{path}.{key}[{i}]", place) for i, one in enumerate(schemas)]

    def _definition(self, target: object, path: str, place: Place) -> str:
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
        target = self.document.find(reference)
        if target is None:
            raise SchemaError(path, f"{key!r} refers to {reference[:100]!r}, which is not in the schema")
        return target[0], f"$({reference[:100]})"
