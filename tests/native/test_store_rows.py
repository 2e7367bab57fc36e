"""Every layer's rows are written to their slots and nowhere else; errors name the wrong argument."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from neo_desktop.native import store_rows


@given(
    layers=st.integers(0, 4),
    slots=st.integers(1, 40),
    width=st.sampled_from([1, 3, 64, 3000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    num_threads=st.integers(1, 3),
    data=st.data(),
)
def test_equals_indexed_assignment(
    layers: int, slots: int, width: int, dtype: torch.dtype, num_threads: int, data: st.DataObject
) -> None:
    """Rows have an iteration's layout: a layer's K and V in turn, with padding behind both."""
    chosen = torch.tensor(data.draw(st.permutations(range(slots))), dtype=torch.int64)
    chosen = chosen[: data.draw(st.integers(0, slots))]
    rows = torch.randn(layers, 2, len(chosen) + 2, width).to(dtype)[:, 1, : len(chosen)]
    into = torch.randn(layers, slots, width).to(dtype)
    expected = into.clone()
    expected[:, chosen] = rows
    store_rows(rows, chosen, into, num_threads)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("argument", "change", "complaint"),
    [
        ("rows", lambda t: t[0], r"rows has shape .*; expected 3 dimensions \[layers, n of slots, width\]"),
        ("rows", lambda t: t[:1], r"rows has shape \[1, 3, 8\]; expected \[2, 3, 8\]"),
        ("rows", lambda t: t[:, :2], r"rows has shape \[2, 2, 8\]; expected \[2, 3, 8\]"),
        ("rows", lambda t: t[:, :, :4], r"rows has shape \[2, 3, 4\]; expected \[2, 3, 8\]"),
        ("rows", lambda t: t.half(), r"rows has dtype float16; expected float32"),
        ("rows", lambda t: t.double(), r"rows has dtype torch.float64"),
        ("rows", lambda t: t.to("meta"), r"rows is on meta; expected a CPU tensor"),
        ("rows", lambda t: t.mT.contiguous().mT, r"rows has strides .*; its last 1 dimension must be"),
        ("slots", lambda t: t[None], r"slots has shape \[1, 3\]; expected 1 dimensions"),
        ("slots", lambda t: t.int(), r"slots has dtype int32; expected int64"),
        ("slots", lambda t: t - 1, r"slots\[1\] is -1; into has slots 0 to 4"),
        ("slots", lambda t: t + 2, r"slots\[2\] is 5; into has slots 0 to 4"),
        ("slots", lambda t: t.repeat_interleave(2)[::2], r"slots has strides"),
        ("into", lambda t: t[:, :, 0], r"into has shape .*; expected 3 dimensions \[layers, slots, width\]"),
        ("into", lambda t: t[:, :1].expand(2, 5, 8), r"into is expanded in dimension 1"),
        ("into", lambda t: t.mT.contiguous().mT, r"into has strides"),
    ],
)
def test_wrong_arguments_are_refused(
    argument: str, change: Callable[[Tensor], Tensor], complaint: str
) -> None:
    given = {"rows": torch.ones(2, 3, 8), "slots": torch.tensor([1, 0, 3]), "into": torch.zeros(2, 5, 8)}
    untouched = given["into"]
    with pytest.raises(ValueError, match=complaint):
        store_rows(**{**given, argument: change(given[argument])})
    assert not untouched.any()


def test_a_wrong_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads"):
        store_rows(torch.ones(1, 1, 1), torch.tensor([0]), torch.zeros(1, 1, 1), -1)
