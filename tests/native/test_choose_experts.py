"""The selected experts are the largest numbers, and their weights are torch's softmax."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop import native
from neo_desktop.models import expert_operators


@given(
    rows=st.integers(0, 5),
    sizes=st.sampled_from(((1, 1), (7, 7), (64, 8), (257, 4))),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    normalises=st.booleans(),
    special=st.sampled_from((0.0, torch.nan, -torch.nan, torch.inf, -torch.inf)),
    seed=st.integers(0, 2**31),
)
def test_the_largest_are_chosen(
    rows: int, sizes: tuple[int, int], dtype: torch.dtype, normalises: bool, special: float, seed: int
) -> None:
    (experts, k), _ = sizes, torch.manual_seed(seed)
    logits = torch.randn(rows, experts + 3).mul(4).to(dtype)[:, :experts]
    if rows:
        logits[seed % rows, seed % experts] = special
    ids, expected_ids = (torch.full((rows, k), -1, dtype=torch.int32) for _ in range(2))
    weights, expected = (torch.zeros(rows, k) for _ in range(2))
    native.choose_experts(logits, normalises, ids, weights)
    expert_operators.choose_experts(logits, normalises, expected_ids, expected)
    is_number = ~expected.isnan().any(dim=1)  # torch selects any experts of other rows
    found, wanted = (logits.float().gather(1, each.long())[is_number] for each in (ids, expected_ids))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected, equal_nan=True)
    assert all(len(set(row)) == k for row in ids.tolist())


@given(
    rows=st.integers(0, 5),
    sizes=st.sampled_from(((1, 1), (7, 7), (64, 8), (257, 4))),
    normalises=st.booleans(),
    epsilon=st.sampled_from((0.0, 1e-20, 1e-6, 0.5)),
    has_bias=st.booleans(),
    has_factors=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sigmoids_have_biases_for_the_choice_and_factors(
    rows: int,
    sizes: tuple[int, int],
    normalises: bool,
    epsilon: float,
    has_bias: bool,
    has_factors: bool,
    seed: int,
) -> None:
    (experts, k), _ = sizes, torch.manual_seed(seed)
    logits, bias, factors = torch.randn(rows, experts) * 4, torch.randn(experts), torch.rand(experts)
    ids, weights = torch.full((rows, k), -1, dtype=torch.int32), torch.zeros(rows, k)
    native.choose_experts(
        logits,
        normalises,
        ids,
        weights,
        is_sigmoid=True,
        epsilon=epsilon,
        bias=bias if has_bias else None,
        factors=factors if has_factors else None,
    )
    shares = logits.double().sigmoid()
    best = (shares + bias * has_bias).topk(k).indices
    assert torch.equal(ids.long(), best)
    expected = shares.gather(1, best)
    if normalises:
        expected /= expected.sum(1, keepdim=True) + epsilon
    if has_factors:
        expected *= factors[best]
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_first_among_equals_is_chosen() -> None:
    ids, weights = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3)
    native.choose_experts(torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0]]), True, ids, weights)
    assert ids.tolist() == [[1, 3, 0]]


def test_wrong_arguments_are_refused() -> None:
    logits, ids, weights = torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="4 columns"):
        native.choose_experts(logits, True, ids, weights)
    with pytest.raises(ValueError, match="bias"):
        native.choose_experts(logits, True, ids[:, :2], weights[:, :2], bias=torch.zeros(3))
    with pytest.raises(ValueError, match="weights"):
        native.choose_experts(logits, True, ids[:, :2], weights[:1, :2])
