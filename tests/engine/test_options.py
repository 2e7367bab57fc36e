"""The engine's options have one definition for Python, the command line and the server."""

from dataclasses import fields
from pathlib import Path, PosixPath
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.loading import DTYPES
from neo_desktop.engine.options import OPTIONS, EngineOptions
from neo_desktop.engine.profiling.budget import limits_of
from neo_desktop.engine.schedule.policies import POLICIES


def test_every_choice_exists_and_every_default_is_one() -> None:
    assert OPTIONS["policy"].choices == tuple(POLICIES)
    assert OPTIONS["dtype"].choices == ("auto", *DTYPES)
    EngineOptions()
    assert set(OPTIONS) == {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("asked", "stated"),
    [
        ({"workers": "a:1,[::1]:3"}, {"workers": "a:1,[::1]:3"}),
        ({"workers": 2}, {"workers": "2"}),
        ({"worker_secret": "a"}, {"worker_secret": Path("a")}),
        ({"model": Path("a")}, {"model": Path("a")}),
        ({"dtype": torch.float16}, {"dtype": "float16"}),
        ({"device": torch.device("cpu")}, {"device": "cpu"}),
        ({"gpu_cache_tokens": 512.0}, {"gpu_cache_tokens": 512}),
        ({"gpu_cache_tokens": np.int64(512)}, {"gpu_cache_tokens": 512}),
        ({"gpu_memory_gib": np.float32(0.5)}, {"gpu_memory_gib": 0.5}),
        ({"gpu_memory_gib": 8}, {"gpu_memory_gib": 8.0}),
        ({"max_batch_tokens": 64}, {"most_requests": 64}),
        ({"max_batch_requests": 300}, {"most_requests": 300}),
    ],
)
def test_options_are_what_a_user_of_python_passes(asked: dict[str, Any], stated: dict[str, object]) -> None:
    options = EngineOptions(**asked)
    assert {name: getattr(options, name) for name in stated} == stated
    limits_of(options, torch.device("cpu"))


odd = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from(
            [10**400, -(10**400), Path("x"), torch.float16, np.float32(1), np.zeros(2), object()]
        ),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner, max_size=2),
    max_leaves=3,
)


@given(name=st.sampled_from(list(OPTIONS)), value=odd)
def test_a_value_of_any_kind_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        options = EngineOptions(**{name: value})
    except ValueError as error:
        assert str(error).startswith(name)  # noqa: PT017
        return
    kinds = get_type_hints(EngineOptions)[name]
    assert type(getattr(options, name)) in {PosixPath, *(get_args(kinds) or (kinds,))}
    assert limits_of(options, torch.device("cpu")).max_batch_tokens > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"policy": "magic"},
            "policy 'magic' is unknown; choose one of: gpu-only, fastdecode, neo, apex, pie, auto",
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
def test_what_cannot_be_is_told_before_anything_is_loaded(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**asked)  # type: ignore[arg-type]
