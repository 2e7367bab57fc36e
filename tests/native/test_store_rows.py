"""Every layer's rows are written to their slots and nowhere else; errors name the wrong argument."""

import hypothesis.strategies as st
import torch
from hypothesis import given

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
