"""Random JSON schemas, followed by the built-in model: every complete answer must be valid.

    python -m benchmarks.json_schemas --count 1000

A seeded generator writes schemas of draft 2020-12 with the keywords that structured output supports. Schemas
that the compiler refuses are counted by reason; answers that `--max-tokens` cuts are counted apart. The
package jsonschema judges, including formats.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.grammar import from_json_schema
from neo_desktop.engine.request import FinishReason

PROMPT = "Answer in JSON: "
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]*[0-9]?$", r"^\d{3}-\d{4}$", "^(red|green|blue)$", "^x")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname")
WORDS = ("name", "size", "kind", "tags", "a b", 'q"', "ünï", "x-1", "id", "Wert")


class SchemaMaker:
    """Makes schemas; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """Return a whole schema, with its definitions."""
        self._definitions = {}
        schema = self._any(depth=3)
        if self._definitions:
            schema = {**schema, "$defs": dict(self._definitions)}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    def _any(self, depth: int) -> dict[str, Any]:
        simple: list[Callable[[], dict[str, Any]]] = [
            self._string,
            self._number,
            self._choice,
            lambda: {"type": self._random.choice(["boolean", "null", ["null", "boolean"]])},
        ]
        nested = [
            self._object,
            self._object,
            self._array,
            self._tuple,
            self._union,
            self._all,
            self._reference,
        ]
        if depth == 0 or self._random.random() < 0.3:
            return self._random.choice(simple)()
        return self._random.choice(nested)(depth - 1)

    def _string(self) -> dict[str, Any]:
        draw = self._random.randrange(4)
        if draw == 0:
            return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 12}
        if draw == 1:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        low = self._random.randrange(5)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randrange(12)}

    def _number(self) -> dict[str, Any]:
        bounds: list[float] = sorted(self._random.randint(-1000, 1000) for _ in range(2))
        low, high = bounds
        kind = "integer"
        if self._random.random() < 0.5:
            kind, low, high = "number", low / 8, high / 8 + 1
        lower = self._random.choice(["minimum", "exclusiveMinimum"])
        upper = self._random.choice(["maximum", "exclusiveMaximum"])
        return {"type": kind, lower: low, upper: high + 2}

    def _choice(self) -> dict[str, Any]:
        values: list[Any] = [None, True, 0, -3, 2.5, "", "a", 'b"\\', "ünï", [], [1, "x"], {}, {"k": [None]}]
        if self._random.random() < 0.3:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.6]
        schema["additionalProperties"] = self._random.random() < 0.1 and self._any(0)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randrange(3)
        limits = {"minItems": low, "maxItems": low + self._random.randrange(4)}
        return {"type": "array", "items": self._any(depth), **limits}

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        rest = self._random.random() < 0.3 and self._any(0)
        limits = {"minItems": len(items), "maxItems": len(items) + 2}
        return {"type": "array", "prefixItems": items, "items": rest, **limits}

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _all(self, depth: int) -> dict[str, Any]:
        draw = self._random.randrange(3)
        if draw == 0:
            return {"allOf": [{"type": "integer", "minimum": self._random.randint(-50, 0)}, {"maximum": 9}]}
        if draw == 1:
            return {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": self._random.randint(2, 9)}]}
        schema = self._object(depth)
        return {"allOf": [schema, {"required": list(schema["properties"])[:2]}]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}  # reserved while it is being made
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}


@dataclass
class Report:
    """Counts of the schemas by outcome."""

    num_valid: int = 0
    num_cut: int = 0  # max_tokens reached
    refused: Counter[str] = field(default_factory=Counter)  # reason -> schemas
    wrong: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)  # schema, answer, error


def follow(engine: Engine, schemas: list[dict[str, Any]], max_tokens: int, report: Report) -> None:
    """Let the model answer all schemas in one batch."""
    usable = []
    for schema in schemas:
        try:
            grammar = from_json_schema(schema)
            engine.grammars.compile(grammar)
            usable.append((schema, grammar))
        except ValueError as error:
            report.refused[str(error)[:100]] += 1
    each = [
        SamplingParams(grammar=grammar, max_tokens=max_tokens, temperature=1.3, seed=index)
        for index, (_, grammar) in enumerate(usable)
    ]
    for (schema, _), output in zip(usable, engine.generate([PROMPT] * len(each), each), strict=True):
        if output.finish_reason is not FinishReason.STOP:
            report.num_cut += 1
            continue
        problem = why_invalid(schema, output.text)
        if problem is None:
            report.num_valid += 1
        else:
            report.wrong.append((schema, output.text, problem))


def why_invalid(schema: dict[str, Any], text: str) -> str | None:
    """Return the error of an answer; None if it is valid."""
    try:
        # A float has too few digits: 2.0000000000000000001 is more than 2.
        value = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    found = next(jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value), None)
    return None if found is None else str(found.message)


def batches(maker: SchemaMaker, count: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield `count` schemas, in lists of at most `size`."""
    for first in range(0, count, size):
        yield [maker.schema() for _ in range(min(size, count - first))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=600)
    arguments = parser.parse_args()

    report, num_done = Report(), 0
    with Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=64_000) as engine:
        for schemas in batches(SchemaMaker(arguments.seed), arguments.count, 64):
            follow(engine, schemas, arguments.max_tokens, report)
            num_done += len(schemas)
            print(f"{num_done}: {report.num_valid} valid, {report.num_cut} cut, {len(report.wrong)} wrong")
    for reason, count in report.refused.most_common():
        print(f"refused {count} times: {reason}")
    for schema, text, problem in report.wrong:
        print(f"WRONG: {problem}\n  {json.dumps(schema)}\n  {text}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
