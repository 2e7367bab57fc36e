"""Surfaces of measured times: they never fall, and missing corners follow the known points."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.profiling.profiler import fill, rising


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_rising_never_falls_and_keeps_the_sum(values: list[float]) -> None:
    result = rising(values)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(result))
    assert sum(result) == pytest.approx(sum(values), abs=1e-6)
    assert rising(sorted(values)) == sorted(values)


@given(
    constant=st.floats(0.001, 1),
    per_request=st.floats(0, 0.1),
    per_context_token=st.floats(0, 1e-4),
    per_token=st.floats(1e-6, 1e-3),
    capacity=st.integers(2_000, 200_000),
)
def test_missing_corners_follow_the_law_of_the_known_points(
    constant: float, per_request: float, per_context_token: float, per_token: float, capacity: int
) -> None:
    xs, ys = (1, 4, 16, 64, 256), (16, 128, 1024, 8192)

    def truth(x: int, y: int) -> float:
        return constant + per_request * x + per_context_token * y + per_token * x * y

    known = {(x, y): truth(x, y) for x in xs for y in ys if x * y <= capacity}
    for x, row in zip(xs, fill(xs, ys, known), strict=True):
        for y, ms in zip(ys, row, strict=True):
            assert ms == pytest.approx(truth(x, y), rel=1e-3)
