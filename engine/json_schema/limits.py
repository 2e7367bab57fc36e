"""Unsatisfiable schemas, and definitions without a finite value."""

import math
from fractions import Fraction

from neo_desktop.engine.json_schema.words import MOST, TYPES, Json, type_of


def contradiction(out: Json) -> str | None:
    """Return why no value is valid, "" if the cause is nested; drop types without values."""
    types = out.get("type", TYPES)
    types = [types] if isinstance(types, str) else list(types)
    if "enum" in out:
        known = {"number" if name == "integer" else name for name in types}
        out["enum"] = [value for value in out["enum"] if type_of(value) in known]
        if not out["enum"]:
            return "'enum' has no value of the 'type'"
    problems = {name: _problem(name, out) for name in types}
    possible = [name for name in types if problems[name] is None]
    if not possible:
        return problems[types[-1]]
    if len(possible) < len(types):
        out["type"] = possible[0] if len(possible) == 1 else possible
    if False in out.get("allOf", ()):
        return ""
    if "anyOf" in out and not any(option is not False for option in out["anyOf"]):
        return ""
    return None


def _problem(name: str, out: Json) -> str | None:
    """Return why no value of a type is valid."""
    low, high = {
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems"),
        "object": ("minProperties", "maxProperties"),
    }.get(name, ("", ""))
    if out.get(low, 0) > out.get(high, MOST):
        return f"{low!r} is more than {high!r}"
    if name in ("integer", "number") and _has_no_number(out, is_integer=name == "integer"):
        return "no number is within its bounds"
    if name == "array":
        first = out.get("prefixItems", ())
        if False in first[: out.get(low, 0)] or (out.get(low, 0) > len(first) and out.get("items") is False):
            return "a required item has no valid value"
    return _problem_of_required(out) if name == "object" else None


def _problem_of_required(out: Json) -> str | None:
    properties, required = out.get("properties", {}), out.get("required", ())
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    for name in required:
        if properties.get(name, not is_closed) is False:
            return f"the required property {name!r} has no valid value"
    if len(required) > out.get("maxProperties", MOST):
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
