"""References between definitions: unsupported ones, and endless recursion."""

import json
import re

from neo_desktop.engine.json_schema.limits import contradiction
from neo_desktop.engine.json_schema.words import Json, Schema

_REFERENCE = re.compile(r'"#/\$defs/(d[0-9]+)"')


class Endings:
    """The definitions of a schema in llguidance's terms."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self.definitions = definitions

    def keep_reference(self, out: Json) -> list[str]:
        """Drop the keywords beside a reference to a recursive definition: llguidance cannot join the two.

        Returns:
            The dropped keywords.
        """
        for part in (out, *out.get("allOf", ())):
            if isinstance(part, dict) and "$ref" in part and self._is_recursive(part["$ref"]):
                reference = part["$ref"]
                dropped = sorted(out.keys() - {"$ref"})
                out.clear()
                out["$ref"] = reference
                return dropped
        return []

    def without_endless(self, schema: Schema) -> Schema:
        """Return the schema with False in place of references to definitions without a finite value."""
        finite = set[str]()
        before = -1
        while before < len(finite):
            before = len(finite)
            for name in reversed(self.definitions):  # most refer to later ones
                if name not in finite and self._prune(self.definitions[name], finite) is not False:
                    finite.add(name)
        self.definitions = {
            name: self._prune(one, finite) for name, one in self.definitions.items() if name in finite
        }
        return self._prune(schema, finite)

    def _is_recursive(self, reference: str) -> bool:
        first = reference.rpartition("/")[2]
        seen, waiting = set[str](), [first]
        while waiting:
            references = set(_REFERENCE.findall(json.dumps(self.definitions[waiting.pop()])))
            if first in references:
                return True
            waiting += references - seen
            seen |= references
        return False

    def _prune(self, schema: Schema, finite: set[str]) -> Schema:
        """Return a schema of values that use only these definitions; False: no value exists."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
            return False
        out = dict(schema)
        for key in ("items", "additionalProperties"):
            if key in out:
                out[key] = self._prune(out[key], finite)
        for key in ("prefixItems", "anyOf", "allOf"):
            if key in out:
                out[key] = [self._prune(one, finite) for one in out[key]]
        for key in ("properties", "patternProperties"):
            if key in out:
                out[key] = {name: self._prune(one, finite) for name, one in out[key].items()}
        return out if contradiction(out) is None else False
