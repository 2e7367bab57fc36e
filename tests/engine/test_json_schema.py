"""The engine enforces schemas or names the unenforced parts, and accepted outputs are valid JSON."""

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from random_schemas import SchemaMaker, Walker

from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.grammar import from_enforceable, from_json_schema, parsed_schema
from neo_desktop.engine.grammar_keys import OpenKeys, TokenIndex
from neo_desktop.engine.json_schema import SchemaError


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key comes twice"
    return dict(pairs)


def check(schema: Any, text: str) -> None:
    """Validate an answer with exact numbers and Python's regular expressions."""
    written = json.dumps(schema).replace(r"\\p{L}", r"[^\\W\\d_]")
    value = json.loads(text, parse_float=Decimal, object_pairs_hook=unique)
    jsonschema.Draft202012Validator(json.loads(written, parse_float=Decimal)).validate(value)


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("first", range(0, 150, 30))
def test_random_schemas_are_followed_to_the_end_or_refused(walker: Walker, first: int) -> None:
    """All keywords of draft 2020-12 and draft 7; fully enforced schemas are validated as written."""
    num_whole = 0
    for seed in range(first, first + 30):
        schema = SchemaMaker(seed).schema()
        try:
            found = parsed_schema(schema)
            grammar = from_enforceable(found.schema)
            walker.compiler.compile(grammar)
        except SettingError:
            continue
        text = walker.text(grammar, seed)
        assert text is not None, schema
        check(found.schema, text)
        if not found.unenforced and "$recursiveRef" not in json.dumps(schema):
            check(schema, text)
            num_whole += 1
    assert num_whole >= 6


MCP = {
    "type": "object",
    "properties": {
        "paths": {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True},
        "labels": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "integer"},
        },
        "secret": {"type": "string", "format": "password", "pattern": "^(?!admin)"},
        "mode": {"not": {"type": "null"}, "enum": ["a", "b"]},
        "when": {"if": {"type": "string"}, "then": {"format": "date"}, "type": "string"},
        "some": {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    },
    "required": ["paths", "mode"],
    "dependentRequired": {"secret": ["when"]},
    "$schema": "http://json-schema.org/draft-07/schema#",
}


def test_what_is_not_enforced_is_named_with_its_path() -> None:
    found = parsed_schema(MCP)
    assert {str(one) for one in found.unenforced} == {
        "$.properties.paths: 'uniqueItems' is not enforced",
        "$.properties.secret: 'pattern' is not enforced",
        "$.properties.mode: 'not' is not enforced",
        "$.properties.when: 'if' is not enforced",
        "$.properties.some: 'contains' is not enforced",
        "$: 'dependentRequired' is not enforced",
    }
    with pytest.raises(SchemaError, match=r"\$: 'dependentRequired' cannot be enforced: remove"):
        parsed_schema(MCP, is_strict=True)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (False, r"follow the schema: \$: the schema is false"),
        ({"enum": []}, "be used: Unsatisfiable schema"),
        ({"type": "strng"}, "be used: Invalid type: strng"),
        (
            {"type": "integer", "minimum": 2, "maximum": 1},
            r"be used: .* minimum \(2\) is greater than maximum",
        ),
        ({"$ref": "#"}, "be used: no text follows it"),
        ({"$ref": "#/$defs/a"}, r"be used: Pointer '/\$defs/a' does not exist"),
        ({"$ref": "https://example.org/x"}, "be used: Resource 'https://example.org/x' is not present"),
        (
            {"required": ["b"], "additionalProperties": False},
            "be used: Unsatisfiable schema: required property 'b' is unsatisfiable",
        ),
        (
            {"properties": {"a b": {"items": 3}}},
            r'follow the schema: \$\.properties\["a b"\]\.items: a schema must be',
        ),
        ({"properties": []}, r"follow the schema: \$: 'properties' must be an object"),
        ({"minLength": -1}, r"follow the schema: \$: 'minLength' must be a whole number"),
        ({"const": "\ud800"}, r"follow the schema: \$: is not valid JSON"),
    ],
)
def test_what_no_value_fulfils_and_what_is_no_schema_is_refused(
    walker: Walker, schema: Any, problem: str
) -> None:
    with pytest.raises(SettingError, match=f"^grammar cannot {problem}"):
        walker.compiler.compile(from_json_schema(schema))


def test_a_schema_that_nests_without_an_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="nests too deeply"):
        from_json_schema(deep)
    with pytest.raises(SchemaError, match="too large"):
        from_json_schema({"anyOf": [{"const": i} for i in range(30_000)]})


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        # Objects with properties allow no others; joined schemas, maps and `true` stay open.
        ({"properties": {"a": True}}, ['{"a": 1}', "{}"], ['{"b": 1}', "1"]),
        ({"properties": {"a": True}, "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
        ({"type": "object"}, ['{"a": {"b": 1}}'], []),
        (
            {"allOf": [{"properties": {"a": True}, "required": ["a"]}, {"properties": {"b": True}}]},
            ['{"a": 1, "b": 2}', '{"a": 1, "c": 2}'],
            ['{"b": 2}'],
        ),
        (
            {"properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": 1}'],
            ["{}", '{"a": 1, "c": 1}'],
        ),
        # Patterns over listed properties, and propertyNames.
        (
            {
                "properties": {"s": {"type": "integer"}},
                "patternProperties": {"^s$": {"minimum": 3}, "^x-": {"type": "null"}},
                "required": ["s"],
                "additionalProperties": False,
            },
            ['{"s": 3}', '{"s": 4, "x-a": null}'],
            ['{"s": 1}', '{"s": 3, "t": 1}', '{"s": 3, "x-a": 1}'],
        ),
        ({"propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1, "b": 2}'], ['{"c": 1}']),
        # oneOf, distinguished by types, values or a property, also behind references.
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    "cat": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                    "dog": {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
                },
            },
            ['{"kind": "cat"}', '{"kind": "dog"}'],
            ['{"kind": "bird"}'],
        ),
        ({"$ref": "#node", "$defs": {"x": {"$anchor": "node", "type": "null"}}}, ["null"], ["1"]),
        ({"type": ["integer", "null"], "minimum": 1.0}, ["1", "null"], ["0", '"a"']),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5"], ["1", "0"]),
        (
            {"items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
            ["[null]"],
            ["[]", "[null,1]"],
        ),
        ({"const": "\x01\x7f\u0085\n"}, ['"\\u0001\\u007f\x85\\n"'], []),
        ({"type": "string", "format": "color", "minLength": 2.0}, ['"ab"'], ['"a"']),
        ({"type": "string", "x-guidance": {"lenient": True}}, ['"a"'], ["  1"]),
    ],
)
def test_values_that_a_schema_allows(
    walker: Walker, schema: Any, allowed: list[str], refused: list[str]
) -> None:
    found = parsed_schema(schema)
    assert not found.unenforced
    for text in [*allowed, *refused]:
        state = walker.compiler.start(from_enforceable(found.schema))
        is_taken = all(state.accept(byte) for byte in text.encode())
        is_whole = is_taken and (state.is_complete or state.allowed_tokens()[32] & 1 == 1)
        assert is_whole == (text in allowed), text


def test_a_key_comes_once(walker: Walker) -> None:
    """Keys arrive byte by byte, or in tokens that hold a whole key or more."""
    whole, longer, pair = b'"a"', b', "a"', b', "z": 1, "z"'
    tokens = [b"", *(bytes((byte,)) for byte in range(256)), whole, longer, pair]
    index, allowed = TokenIndex(tokens), b"\xff" * 33
    for written, refused in (
        (b'{"a": 1', {longer, pair}),
        (b"{", {pair}),
        (b'{"a": 1, ', {whole, longer, pair}),
        (b'{"a": 1, "a', {b'"', whole}),
        (b'{"a": "', set()),
        (b'{"b": [{"a": 1}, {"c": 1', {pair}),
        (b'f "a" {"\\"": "\\", \\"b', set()),
    ):
        keys = OpenKeys()
        assert keys.feed(written)
        left = keys.without_repeated(allowed, index)
        lost = {token for i, token in enumerate(tokens) if token and not left[i // 8] >> i % 8 & 1}
        assert lost == refused, written
    grammar = from_json_schema({"additionalProperties": {"type": "null"}, "minProperties": 60})
    for seed in range(3):
        text = walker.text(grammar, seed)
        assert text is not None
        assert len(json.loads(text, object_pairs_hook=unique)) >= 60
