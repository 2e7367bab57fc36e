"""An array that grows without changing its earlier views."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.int_array import IntArray

numbers = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


@given(start=numbers, pieces=st.lists(numbers, max_size=6), one_by_one=st.booleans())
def test_views_keep_their_numbers_however_the_array_grows(
    start: list[int], pieces: list[list[int]], one_by_one: bool
) -> None:
    array, expected = IntArray(start), list(start)
    views = [(array.view(), list(expected))]
    for piece in pieces:
        if one_by_one:
            for number in piece:
                array.append(number)
        else:
            array.extend(piece)
        expected += piece
        views.append((array.view(), list(expected)))
    assert len(array) == len(expected)
    for view, then in views:
        assert view.dtype == np.int32
        assert view.tolist() == then


def test_a_view_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        IntArray([1, 2]).view()[0] = 3
