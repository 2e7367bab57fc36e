"""The sampler draws from the distribution that its settings describe, reproducibly."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neo_desktop.engine.batch import SamplingInput
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams

VOCAB = 50
PROMPT, OUTPUT = (1, 2, 3, 4), (3, 5, 5, 9)


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)).expand(rows, -1)


def item(params: SamplingParams, position: int = 0, seed: int = 1) -> SamplingInput:
    return SamplingInput(params, seed, 0, position, PROMPT, OUTPUT)


def draw(params: SamplingParams, count: int) -> list[int]:
    """Token ids at `count` positions of one request."""
    tokens = sample(logits(count), [item(params, position) for position in range(count)])
    assert all(token is not None for token in tokens)
    return [token.token_id for token in tokens if token is not None]


def transformers_distribution(params: SamplingParams) -> Tensor:
    """The distribution that transformers' own processors give, [VOCAB]."""
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
    scores = processors(torch.tensor([PROMPT + OUTPUT]), logits().clone())
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
    # Put the two best tokens at the border: the one in the output wins before the penalty and loses after it.
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
    other_choice = [sample(logits(), [replace(item(params, p), choice=1)])[0] for p in range(200)]
    for other in (other_seed, other_choice):
        assert [token.token_id for token in other if token] != first


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
