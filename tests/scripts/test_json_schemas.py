"""Random schemas, a small sample from the script's."""

import pytest

from benchmarks.json_schemas import Report, SchemaMaker, follow, why_invalid
from neo_desktop import Engine


@pytest.mark.sample(0)
def test_sixty_random_schemas_are_followed() -> None:
    maker, report = SchemaMaker(seed=1), Report()
    with Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=32_000) as engine:
        follow(engine, [maker.schema() for _ in range(60)], 400, report)
    assert report.wrong == []
    assert report.num_valid + report.num_cut + report.refused.total() == 60
    assert report.num_valid >= 45


def test_the_judge_finds_what_is_wrong() -> None:
    schema = {"type": "object", "properties": {"a": {"exclusiveMinimum": 2}}, "required": ["a"]}
    assert why_invalid(schema, '{"a": 2.00000000000000000001}') is None
    assert why_invalid(schema, '{"a": 2}') is not None
    assert why_invalid(schema, "{}") is not None
    assert why_invalid(schema, "{") is not None
