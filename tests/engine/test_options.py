"""The engine's options: stated once, and the same for everybody who reads them."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from neo_desktop.engine.loading import CPU_CACHE_DTYPES, DTYPES
from neo_desktop.engine.options import OPTIONS, EngineKeywords, EngineOptions
from neo_desktop.engine.schedule.policies import POLICIES


def test_the_keywords_of_python_are_the_fields() -> None:
    types = get_type_hints(EngineOptions)
    assert get_type_hints(EngineKeywords) == {name: kind for name, kind in types.items() if name != "model"}


def test_every_choice_exists_and_every_default_is_one() -> None:
    assert set(OPTIONS["policy"].choices) == set(POLICIES)
    assert OPTIONS["dtype"].choices == ("auto", *DTYPES)
    assert OPTIONS["cpu_cache_dtype"].choices == tuple(CPU_CACHE_DTYPES)
    EngineOptions()
    assert set(OPTIONS) == {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"policy": "magic"},
            "policy 'magic' is unknown; choose one of: auto, neo, apex, pie, fastdecode, gpu-only",
        ),
        ({"gpu_cache_tokens": -1}, "gpu_cache_tokens must be at least 0, got -1"),
        ({"gpu_memory_gib": 0.0}, "gpu_memory_gib must be at least 0.001, got 0"),
        ({"gpu_weights_gib": 0.0}, "gpu_weights_gib must be at least 0.0001, got 0"),
        ({"cpu_memory_gib": float("nan")}, "cpu_memory_gib must be at least 0.001, got nan"),
        ({"gpu_memory_gib": float("inf")}, "gpu_memory_gib must be finite, got inf"),
        ({"host_reserve_gib": -1.0}, "host_reserve_gib must be at least 0, got -1"),
        ({"host_reserve_gib": float("nan")}, "host_reserve_gib must be at least 0, got nan"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**given)  # type: ignore[arg-type]
