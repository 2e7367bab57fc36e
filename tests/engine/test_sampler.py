"""The sampler draws from the distribution of its settings, reproducibly."""

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neo_desktop.engine import sampler
from neo_desktop.engine.batch import SamplingInput
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams

VOCAB = 50
PROMPT, OUTPUT = IntArray((1, 2, 3, 4)).view(), IntArray((3, 5, 5, 9)).view()


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)).expand(rows, -1)


def item(params: SamplingParams, position: int = 0, seed: int = 1) -> SamplingInput:
    return SamplingInput(params, seed, 0, position, PROMPT, OUTPUT)


def draw(params: SamplingParams, count: int) -> list[int]:
    """Return token ids at `count` positions of one request."""
    tokens = sample(logits(count), [item(params, position) for position in range(count)])
    assert all(token is not None for token in tokens)
    return [token.token_id for token in tokens if token is not None]


def transformers_distribution(params: SamplingParams) -> Tensor:
    """Return the distribution of transformers' own processors, [VOCAB]."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([[*PROMPT, *OUTPUT]]), logits().clone())
    return scores.softmax(dim=-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_the_frequencies_are_those_of_transformers_processors(params: SamplingParams) -> None:
    count = 20_000
    expected = transformers_distribution(params).double()
    observed = torch.bincount(torch.tensor(draw(params, count)), minlength=VOCAB)
    assert observed[expected == 0].sum() == 0, "a token that the settings exclude was chosen"
    deviation = (observed - count * expected).abs() / (count * expected + 1).sqrt()
    assert deviation.max() < 5, "a frequency is more than five standard deviations off"


def test_presence_and_frequency_penalties_follow_openai_s_formula() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.4)
    counts = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB)
    expected = logits()[0] - 0.4 * counts - 0.7 * (counts > 0)
    # Two best tokens at the border: the one in the output wins before the penalty and loses after it.
    close = logits().clone()
    close[0, 5] = expected.max() + 1.0
    assert close.argmax() == 5
    (token,) = sample(close, [item(params)])
    assert token is not None
    assert token.token_id == int(expected.index_fill(0, torch.tensor([5]), -100).argmax())


def test_greedy_takes_the_best_token_and_batches_mix_freely() -> None:
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=5.0, seed=3)
    tokens = sample(logits(3), [item(greedy), item(hot, seed=3), item(greedy)])
    alone = sample(logits(), [item(hot, seed=3)])
    assert tokens[0] == tokens[2]
    assert tokens[0] is not None
    assert tokens[0].token_id == int(logits().argmax())
    assert tokens[1] == alone[0]


def test_a_token_depends_on_seed_choice_and_position_alone() -> None:
    params = SamplingParams(temperature=3.0)
    first = draw(params, 200)
    assert draw(params, 200) == first
    other_seed = [sample(logits(), [item(params, p, seed=2)])[0] for p in range(200)]
    other_choice = [sample(logits(), [item(params, p)._replace(choice=1)])[0] for p in range(200)]
    for other in (other_seed, other_choice):
        assert [token.token_id for token in other if token] != first


odd_numbers = st.one_of(
    st.sampled_from([0, 5e-324, 1e-310, 1e-46, 1e-40, 1e-38, 1e-30, 0.01, 1.0, 100.0, 1e308, 10**400, 2**64]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(2**65), 2**65),
)
odd_values = st.one_of(odd_numbers, st.booleans(), st.none(), st.text(max_size=2), st.lists(odd_numbers))


@given(
    st.dictionaries(
        st.sampled_from([each.name for each in fields(SamplingParams) if "grammar" not in each.name]),
        odd_values | st.dictionaries(st.integers(0, VOCAB - 1), odd_numbers, max_size=3),
        max_size=4,
    )
)
def test_settings_are_refused_or_give_a_token(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except SettingError as error:
        assert error.field in values  # noqa: PT017
        return
    (token,) = sample(logits(), [item(params)])
    assert token is not None
    assert 0 <= token.token_id < VOCAB


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-46, 1e-40, 1e-38, 1e-30])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_p": 1e-320}, {"min_p": 1e-320}])
def test_a_temperature_that_is_nearly_0_is_greedy(temperature: float, others: dict[str, float]) -> None:
    assert set(draw(SamplingParams(temperature=temperature, **others), 20)) == {int(logits().argmax())}


def test_a_very_low_temperature_is_greedy_not_nan() -> None:
    assert set(draw(SamplingParams(temperature=1e-6), 50)) == {int(logits().argmax())}


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    params = SamplingParams(temperature=0.3, repetition_penalty=2.0, logprobs=4)
    (token,) = sample(logits(), [item(params)])
    assert token is not None
    assert token.logprob is not None
    reference = logits()[0].double().log_softmax(dim=-1)
    assert token.logprob.token_id == token.token_id
    assert token.logprob.logprob == pytest.approx(float(reference[token.token_id]), abs=1e-5)
    assert [top.token_id for top in token.top_logprobs] == reference.topk(4).indices.tolist()
    assert [top.logprob for top in token.top_logprobs] == pytest.approx(
        reference.topk(4).values.tolist(), abs=1e-5
    )


def test_logits_that_are_not_finite_give_no_token() -> None:
    broken = logits(2).clone()
    broken[0, 3] = float("nan")
    tokens = sample(broken, [item(SamplingParams(temperature=0)), item(SamplingParams(temperature=0))])
    assert tokens[0] is None
    assert tokens[1] is not None


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=4, top_p=0.8)], ids=str
)
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_harms_no_other(params: SamplingParams, damage: float) -> None:
    broken = logits(3).clone()
    broken[1, 3] = damage
    asks = replace(params, logprobs=2)
    tokens = sample(broken, [item(params), item(asks), item(asks)])
    assert tokens[1] is None
    assert tokens[0] == sample(logits(), [item(params)])[0]
    assert tokens[2] == sample(logits(), [item(asks)])[0]


def test_every_row_gets_its_own_settings() -> None:
    """The result of a request is independent of the other requests in the batch."""
    every = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=0, repetition_penalty=3.0, logprobs=5),
        SamplingParams(temperature=1.5, top_k=3, logprobs=2),
        SamplingParams(temperature=0.8, frequency_penalty=1.5, presence_penalty=-0.5),
        SamplingParams(temperature=1.2, top_p=0.6, min_p=0.1, repetition_penalty=0.5),
    ]
    inputs = [item(params, position=row, seed=row) for row, params in enumerate(every)]
    inputs[4] = inputs[4]._replace(output_token_ids=IntArray((7, 8, 8, 8)).view())
    rows = torch.cat([logits(seed=row) for row in range(len(every))])
    together = sample(rows, inputs)
    for row, token in enumerate(together):
        alone = sample(rows[row : row + 1], [inputs[row]])[0]
        assert token is not None
        assert alone is not None
        assert token.token_id == alone.token_id
        count = every[row].logprobs
        assert len(token.top_logprobs) == (count or 0)
        assert (token.logprob is None) == (count is None)
        for one, other in zip(
            (token.logprob, *token.top_logprobs), (alone.logprob, *alone.top_logprobs), strict=True
        ):
            if one is not None and other is not None:
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_pieces_of_a_batch_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3))
    rows[4, 9] = torch.nan
    settings = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, logprobs=0),
    )
    inputs = [item(settings[row % 4], position=row) for row in range(7)]
    whole = sample(rows, inputs)
    assert [token is None for token in whole] == [row == 4 for row in range(7)]
    for count in (1, 2, 3):
        monkeypatch.setattr(sampler, "PIECE_ELEMENTS", count * VOCAB)
        assert sample(rows, inputs) == whole
    assert sample(rows[:0], []) == []


@given(
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    count=st.integers(1, 32),
    seed=st.integers(0, 2**32),
)
def test_tokens_do_not_depend_on_how_many_are_sorted(
    spread: float, top_k: int, top_p: float, min_p: float, count: int, seed: int
) -> None:
    rows = spread * torch.randn(6, 300, generator=torch.Generator().manual_seed(seed))
    rows[2, 40:] = -torch.inf  # a grammar does the same
    rows[3, 7] = torch.nan
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    inputs = [item(params, position=row, seed=seed) for row in range(6)]
    with patch.object(sampler, "LEADING_TOKENS", 300):
        expected = sample(rows, inputs)
    assert [token is None for token in expected] == [row == 3 for row in range(6)]
    with patch.object(sampler, "LEADING_TOKENS", count):
        assert sample(rows, inputs) == expected
        assert [sample(rows[[row]], [inputs[row]])[0] for row in range(6)] == expected


def test_random_numbers_are_those_of_philox() -> None:
    """A seed keeps its tokens from one version to the next."""
    inputs = [item(SamplingParams(), position=p, seed=s) for p, s in [(0, 0), (1, 7), (8000, -3), (5, 2**63)]]
    expected = [
        np.random.Generator(
            np.random.Philox(key=np.array([i.seed % 2**64, i.choice], np.uint64), counter=i.position)
        ).random()
        for i in inputs
    ]
    flat = torch.zeros(len(inputs), 10_000)  # equal weights: the token drawn reveals the random number
    tokens = sample(flat, inputs)
    assert [token.token_id if token else None for token in tokens] == [int(10_000 * u) for u in expected]
