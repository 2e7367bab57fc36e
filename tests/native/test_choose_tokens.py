"""The most probable tokens are those of torch; rows that are not finite get none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop import native
from neo_desktop.models import operators


@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from((1, 7, 1024, 1025, 5000)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    special=st.sampled_from((0.0, torch.nan, -torch.nan, torch.inf, -torch.inf)),
    seed=st.integers(0, 2**31),
)
def test_the_first_largest_is_chosen(
    rows: int, columns: int, dtype: torch.dtype, special: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, columns + 3).round(decimals=1).to(dtype)[:, :columns]  # with equal numbers
    if rows:
        logits[seed % rows, seed % columns] = special
    found, expected = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    native.choose_tokens(logits, found)
    operators.choose_tokens(logits, expected)
    assert torch.equal(found < 0, expected < 0)
    for row, token in enumerate(found.tolist()):
        if token >= 0:
            assert token == (logits[row] == logits[row].max()).nonzero()[0].item()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        native.choose_tokens(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype"):
        native.choose_tokens(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
