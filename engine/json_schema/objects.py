"""The keywords of objects."""

import re
from typing import TYPE_CHECKING

from neo_desktop.engine.json_schema.words import (
    CONSTRAINTS,
    IN_PLACE,
    MOST,
    Json,
    Schema,
    SchemaError,
    is_known_pattern,
    step,
)

if TYPE_CHECKING:
    from neo_desktop.engine.json_schema.walk import Place, Walk

_ONE_OF_WORDS = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$")
_FINITE = re.compile(r"\^[^*+]*\$")


class Objects:
    """Translates the keywords of objects in one schema to llguidance's terms.

    Args:
        walk: over the whole schema.
        given: the schema's constraining keywords.
        out: receives the result.
        path: of the schema.
    """

    def __init__(self, walk: "Walk", given: Json, out: Json, path: str) -> None:
        self._walk, self._given, self._out, self._path = walk, given, out, path

    def express(self, schema: Json, place: "Place") -> None:
        """Add the keywords to the result."""
        given, out, path = self._given, self._out, self._path
        self._walk.counts(given, out, path, "minProperties", "maxProperties")
        if "required" in given:
            out["required"] = self._names(given["required"], "required")
        for key in ("properties", "patternProperties"):
            if key in given:
                out[key] = {
                    name: self._walk.visit(one, f"{path}.{key}{step(name)}", place.inner())
                    for name, one in self._object(key).items()
                }
        additional = self._additional(schema, place)
        if additional is not None:
            out["additionalProperties"] = self._walk.visit(
                additional, f"{path}.additionalProperties", place.inner()
            )
        self._patterns()
        self._property_names()
        self._dependencies()
        self._property_counts()

    def _object(self, key: str) -> Json:
        value = self._given[key]
        if not isinstance(value, dict):
            raise SchemaError(self._path, f"{key!r} must be an object")
        return value

    def _names(self, value: object, key: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise SchemaError(self._path, f"{key!r} must be a list of names")
        return list(dict.fromkeys(value))

    def _additional(self, schema: Json, place: "Place") -> object:
        """Return the schema of other properties; None: any value."""
        additional, unevaluated = (
            self._given.get(f"{which}Properties") for which in ("additional", "unevaluated")
        )
        if additional is not None:
            return additional
        is_bounded = unevaluated is not None and unevaluated is not True
        if not is_bounded and not (place.closes and self._given.keys() & {"properties", "allOf"}):
            return None
        names, is_open, is_certain = self._walk.document.names(schema)
        if is_bounded:
            if not is_certain:
                self._walk.leave_out(self._path, "unevaluatedProperties")
            self._add(names)
            return unevaluated
        has_names = "properties" in self._given or bool(names)
        is_met = self._out.get("minProperties", 0) <= len(names)
        if not is_open and has_names and is_met:
            self._add(names)
            return False
        return None

    def _add(self, names: list[str]) -> None:
        properties = self._out.setdefault("properties", {})
        for name in names:
            properties.setdefault(name, True)

    def _patterns(self) -> None:
        """Name the properties of patterns that are words; no two patterns may overlap."""
        kept: dict[str, Schema] = {}
        properties: dict[str, Schema] = self._out.get("properties", {})
        for pattern, schema in self._out.pop("patternProperties", {}).items():
            words = _ONE_OF_WORDS.fullmatch(pattern)
            if words is not None:
                for name in (words[1] or words[2]).split("|"):
                    known = properties.get(name)
                    properties[name] = schema if known is None else {"allOf": [known, schema]}
            elif not is_known_pattern(pattern) or (properties and _FINITE.fullmatch(pattern)):
                self._walk.leave_out(self._path, "patternProperties")
            else:
                kept[pattern] = schema
        if properties:
            self._out["properties"] = properties
        if len(kept) > 1:
            schemas = [one for one in kept.values() if one is not True]
            kept = {"|".join(f"(?:{pattern})" for pattern in kept): {"allOf": schemas} if schemas else True}
        if kept:
            self._out["patternProperties"] = kept

    def _property_names(self) -> None:
        """Translate the names of a map, if they follow one pattern or are listed."""
        names = self._given.get("propertyNames", True)
        if not isinstance(names, dict | bool):
            raise SchemaError(self._path, "'propertyNames' must be an object or a boolean")
        if names is False:
            self._out["maxProperties"] = 0
        if isinstance(names, bool):
            return
        rest = {key: value for key, value in names.items() if key in CONSTRAINTS and key != "format"}
        if rest.get("type") in ("string", ["string"]):
            del rest["type"]
        is_map = not self._given.keys() & {"properties", "patternProperties", "required", *IN_PLACE}
        allowed = self._out.get("additionalProperties", True)
        match rest:
            case {"pattern": str(pattern)} if is_map and len(rest) == 1 and is_known_pattern(pattern):
                self._out |= {"patternProperties": {pattern: allowed}, "additionalProperties": False}
            case {"enum": list(words)} if is_map and len(rest) == 1:
                texts = [word for word in words if isinstance(word, str)]
                self._out |= {"properties": dict.fromkeys(texts, allowed), "additionalProperties": False}
            case {}:
                if rest:
                    self._walk.leave_out(self._path, "propertyNames")

    def _dependencies(self) -> None:
        required = set(self._out.get("required", ()))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            needed = self._object(key).values() if key in self._given else ()
            if any(
                not required.issuperset(self._names(one, key)) if isinstance(one, list) else one is not True
                for one in needed
            ):
                self._walk.leave_out(self._path, key)

    def _property_counts(self) -> None:
        """Drop counts that always hold, and those that llguidance cannot enforce."""
        out, required = self._out, self._out.get("required", ())
        names = {*out.get("properties", {}), *required}
        is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if out.get("minProperties", 0) <= len(required):
            out.pop("minProperties", None)
        if is_closed and out.get("maxProperties", 0) >= len(names):
            out.pop("maxProperties", None)
        low = out.get("minProperties", 0) - len(required)
        high = out.get("maxProperties", MOST) - len(required)
        if low <= 0 and "maxProperties" not in out:
            return
        is_one = is_closed and low <= 1 and high in (1, MOST - len(required))
        is_kept = is_one or len(names) == len(required)
        if is_kept and not self._given.keys() & set(IN_PLACE):
            return
        for key in ("minProperties", "maxProperties"):
            if out.pop(key, None) is not None:
                self._walk.leave_out(self._path, key)
