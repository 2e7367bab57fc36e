"""References within a schema, and common properties of several schemas for one value."""

from collections.abc import Iterator
from urllib.parse import unquote

from neo_desktop.engine.json_schema.words import Json, same, types_of, values_of


class Document:
    """A whole schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._anchors = dict(_anchors(root))

    def find(self, reference: str) -> tuple[object] | None:
        """Return the target of a reference; None: it is not in the schema."""
        base, _, fragment = reference.partition("#")
        target: object = self._anchors.get(base, self._root) if base else self._root
        if base and base not in self._anchors:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return (self._anchors[f"#{fragment}"],) if f"#{fragment}" in self._anchors else None
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isascii() and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            else:
                return None
        return (target,)

    def names(self, schema: Json) -> tuple[list[str], bool, bool]:
        """Return the property names of a schema and of the schemas that it applies.

        Returns:
            The names; True if one of the schemas restricts other names; True if every schema must hold.
        """
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
            applied = [one[key] for key in ("then", "else") if key in one]
            for key in ("allOf", "anyOf", "oneOf"):
                applied += one[key] if isinstance(one.get(key), list) else ()
            for key in ("dependentSchemas", "dependencies"):
                applied += one[key].values() if isinstance(one.get(key), dict) else ()
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                applied += (isinstance(one.get(key), str) and self.find(one[key])) or ()
            waiting += reversed(applied)
        return list(names), not is_plain, is_certain

    def are_disjoint(self, schemas: list[object]) -> bool:
        """Return True if no value can be valid for two schemas."""
        if len(schemas) > 64:
            return False
        return all(self._differ(one, two, 4) for i, one in enumerate(schemas) for two in schemas[:i])

    def _differ(self, one: object, two: object, depth: int) -> bool:
        one, two = self._target(one), self._target(two)
        if depth == 0 or not isinstance(one, dict) or not isinstance(two, dict):
            return one is False or two is False
        types = [types_of(each) for each in (one, two)]
        if types[0] is not None and types[1] is not None and not types[0] & types[1]:
            return True
        values = [values_of(each) for each in (one, two)]
        if values[0] is not None and values[1] is not None:
            return not any(same(first, second) for first in values[0] for second in values[1])
        return types == [{"object"}, {"object"}] and any(
            self._differ(_member(one, name), _member(two, name), depth - 1)
            for name in [*one.get("required", ()), *two.get("required", ())]
        )

    def _target(self, schema: object) -> object:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or len(schema) > 1:
                break
            target = self.find(schema["$ref"])
            schema = target[0] if target else {}
        return schema


def _anchors(root: object) -> Iterator[tuple[str, object]]:
    """Yield the schemas' `#anchor` and `$id`, the outermost last."""
    waiting, anchors = [root], list[tuple[str, object]]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for key, prefix in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                if isinstance(one.get(key), str):
                    anchors.append((prefix + one[key].removesuffix("#"), one))
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    yield from reversed(anchors)


def _member(schema: Json, name: str) -> object:
    properties = schema.get("properties")
    member = properties.get(name) if isinstance(properties, dict) else None
    return schema.get("additionalProperties", True) if member is None else member
