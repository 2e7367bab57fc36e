"""Drafts change no token: with any policy, cache, setting and drafter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from cost_models import machine
from drafters import Informed, OftenRight, OftenRightModel
from engine_fakes import FakeExecutor, make_request, reference_output
from hypothesis import given
from hypothesis import strategies as st
from seeds import few_examples
from transformers import AutoModelForCausalLM

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import grammar as grammars
from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.draft_rows import MAX_WIDTH
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.speculate.drafter import Draft
from neo_desktop.engine.speculate.ngram import NgramDrafter

JSON = grammars.from_json_schema(
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_k": 40, "logprobs": 0},
    {"temperature": 1.0, "seed": 4, "n": 2},
    {"temperature": 1.0, "seed": 5, "grammar": JSON},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 1.0, "top_p": 0.9, "max_tokens": 17},
)
COST = machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def plain(model: Path) -> SimpleNamespace:
    """Prompts, their settings and their answers without drafts."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 33, 7, 90, 64, 16)
    prompts = [tuple(torch.randint(256, (length,), generator=generator).tolist()) for length in lengths]
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True} | each) for each in SETTINGS]
    with Engine.from_pretrained(
        model, device="cpu", policy="gpu-only", gpu_cache_tokens=8192, speculate="off"
    ) as engine:
        first = engine.generate([prompts[0]], params[0])[0]
        params.append(SamplingParams(max_tokens=60, temperature=0.0, stop=first.text[20:24]))
        prompts.append(prompts[0])
        answers = engine.generate(prompts, params)
        assert engine.stats().speculative is None
    return SimpleNamespace(prompts=prompts, params=params, answers=answers)


def shown(answers: list[Completion]) -> list[Any]:
    return [(answer.text, answer.tokens, answer.finish_reason) for answer in answers]


@few_examples
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    cache_tokens=st.sampled_from((288, 512, 4096)),
    share=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    seed=st.integers(0, 99),
)
def test_answers_are_the_same_with_right_wrong_and_mixed_drafts(
    model: Path, plain: SimpleNamespace, policy: str, cache_tokens: int, share: float, seed: int
) -> None:
    known = iter(plain.answers)
    answers = {
        (prompt, choice): next(known).token_ids
        for prompt, params in zip(plain.prompts[:-1], plain.params, strict=False)
        for choice in range(params.n)
    }
    drafter = Informed(answers, share, Random(seed))
    with Engine.from_pretrained(
        model,
        device="cpu",
        policy=policy,
        gpu_cache_tokens=cache_tokens,
        cpu_cache_tokens=cache_tokens,
        swap_cache_tokens=cache_tokens,
        cost_model=COST,
    ) as engine:
        engine._scheduler._speculation = Speculation(drafter, COST, 64)
        found = engine.generate(plain.prompts, plain.params)
        speculative = engine.stats().speculative
    assert shown(found) == shown(plain.answers)
    assert speculative is not None
    assert speculative.num_drafted_tokens > 0
    if share == 1.0:
        assert speculative.num_accepted_tokens > speculative.num_drafted_tokens // 2


def test_drafts_from_the_own_text_change_nothing_and_can_be_switched_off(
    model: Path, plain: SimpleNamespace
) -> None:
    loop = [7, 8, 9, 10] * 20
    params = [SamplingParams(max_tokens=40, temperature=0.0, speculation=is_on) for is_on in (False, True)]
    with Engine.from_pretrained(model, device="cpu", policy="gpu-only", speculate="ngram") as engine:
        without = engine.generate([*plain.prompts, loop], [*plain.params, params[0]])
        engine.generate([loop], params[0])
        before = engine.stats().speculative
        alone = engine.generate([loop], params[1])[0]
        after = engine.stats().speculative
    assert shown(without[:-1]) == shown(plain.answers)
    assert alone.token_ids == without[-1].token_ids
    assert before is not None
    assert after is not None
    assert after.num_drafts > before.num_drafts


def test_a_predicted_output_is_drafted_and_counted(model: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(model, device="cpu", policy="gpu-only", cost_model=COST) as engine:
        answer = engine.generate(["abcdefgh"], replace(params, speculation=False))[0]
        prepared = engine.prepare("abcdefgh", replace(params, prediction="abc"))
        assert prepared.predicted_token_ids == engine.prepare("abc", params).token_ids
        engine.add("r", replace(prepared, predicted_token_ids=answer.token_ids))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    tokens = [token.token_id for output in outputs for token in output.tokens]
    assert tokens == list(answer.token_ids)
    last = outputs[-1]
    assert 30 < last.num_accepted_predicted < 60
    assert last.num_rejected_predicted <= MAX_WIDTH
    assert len(outputs) < 30


class Guesses:
    """Drafts tokens that may well come next, one as likely as the other; notes how many it drafts."""

    expected = (0.9,)

    def __init__(self, likely: Mapping[tuple[int, ...], Sequence[int]], num_prompt_tokens: int) -> None:
        self._likely, self._first, self._random = likely, num_prompt_tokens, Random(0)

    def draft(self, request: Request, most: int) -> Draft:
        known, drafted = tuple(request.token_ids[self._first :]), ()
        for _ in range(most):
            drafted += (self._random.choice(self._likely[known + drafted]),)
        return Draft(drafted)


def test_sampled_answers_have_the_models_own_distribution(model: Path) -> None:
    """Chi-square over answers of three tokens out of the four most probable ones, drafted and verified."""
    count, top, temperature, prompt = 512, 4, 4.0, [5, 6, 7, 8]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    likely: dict[tuple[int, ...], list[int]] = {}
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(3):
        for answer in [each for each in chances if len(each) == length]:
            with torch.inference_mode():
                logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, -1]
            best, tokens = (logits / temperature).topk(top)
            likely[answer] = tokens.tolist()
            for token, share in zip(likely[answer], best.softmax(0).tolist(), strict=True):
                chances[*answer, token] = chances[answer] * share
    params = SamplingParams(max_tokens=3, temperature=temperature, top_k=top, n=128, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "policy": "gpu-only", "max_batch_requests": 6}
    with Engine.from_pretrained(model, cost_model=COST, **options) as engine:
        engine._scheduler._speculation = Speculation(Guesses(likely, len(prompt)), COST, 256)
        asked = [replace(params, seed=seed) for seed in range(count // params.n)]
        answers = Counter(each.token_ids for each in engine.generate([prompt] * len(asked), asked))
        speculative = engine.stats().speculative
    assert speculative is not None
    assert count / 8 < speculative.num_accepted_tokens < speculative.num_drafted_tokens
    expected = {answer: count * chance for answer, chance in chances.items() if len(answer) == 3}
    assert answers.keys() <= expected.keys()
    statistic = sum((answers[answer] - mean) ** 2 / mean for answer, mean in expected.items())
    free = len(expected) - 1
    assert free == top**3 - 1
    assert abs(statistic - free) < 4 * (2 * free) ** 0.5  # its mean and four standard deviations


@cache
def virtual_ms(share: float | None, count: int, row_ms: float, model: tuple[Any, ...] | None = None) -> float:
    """Return the time of some requests with 200 tokens each, if rows cost `row_ms` and the weights 8 ms.

    Args:
        share: of right tokens of a drafter that takes no time; None: there is none.
        model: arguments of an `OftenRightModel`; None: no model drafts.
    """
    kv = KVCache({KVTier.DEVICE: 4000}, 4)
    drafter = None if share is None else OftenRight(share)
    drafting = None if model is None else OftenRightModel(*model)
    nothing = drafter is None and drafting is None
    speculation = None if nothing else Speculation(drafter, None, 64, drafting)
    scheduler = Scheduler(kv, POLICIES["gpu-only"], SchedulerLimits(256, 64), speculation=speculation)
    requests = [make_request(str(i), [1, 2, i], SamplingParams(max_tokens=200)) for i in range(count)]
    executor, ms = FakeExecutor(4, 256), 0.0
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        total_ms = 8 + row_ms * sum(batch.num_tokens for batch in plan.sub_batches)
        scheduler.update(replace(executor.execute(plan), timing=IterationTiming(total_ms, 0.0)))
        ms += total_ms
    for request in requests:
        assert request.token_ids[3:] == reference_output(request, 200)
    return ms + (0.0 if drafting is None else drafting.spent_ms)


@pytest.mark.sample(4)
@pytest.mark.parametrize("row_ms", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_drafts_save_time_where_they_are_right_and_rows_are_cheap_and_cost_little_elsewhere(
    count: int, row_ms: float
) -> None:
    without = virtual_ms(None, count, row_ms)
    by_share = {share: virtual_ms(share, count, row_ms) for share in (0.0, 0.3, 0.6, 0.9, 1.0)}
    assert max(by_share.values()) < 1.05 * without
    if count == 1 and row_ms == 0.1:
        assert by_share[1.0] < without / 4
        assert by_share[0.6] < without / 1.7


@pytest.mark.sample(6)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("step_ms", [0.4, 2.0, 9.0])
@pytest.mark.parametrize("count", [1, 4])
def test_a_model_drafts_where_that_pays_and_costs_little_elsewhere(
    count: int, step_ms: float, share: float
) -> None:
    without, with_model = (virtual_ms(None, count, 0.1, model) for model in (None, (share, step_ms)))
    assert with_model < 1.05 * without
    assert virtual_ms(0.9, count, 0.1, (share, step_ms)) < 1.05 * virtual_ms(0.9, count, 0.1)
    if share == 1.0 and step_ms == 0.4:
        assert with_model < without / 2.5


def test_other_drafts_remain_where_a_model_has_none() -> None:
    silent = 1.0, 0.01, 0.99, False
    assert virtual_ms(0.9, 1, 0.1, silent) == virtual_ms(0.9, 1, 0.1)


@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    predicted=st.lists(st.integers(0, 3), max_size=12),
    most=st.integers(1, MAX_WIDTH),
)
def test_a_draft_continues_an_earlier_occurrence_of_the_last_tokens(
    text: list[int], predicted: list[int], most: int
) -> None:
    request = make_request("r", [0, *text], SamplingParams())
    request.predicted_token_ids = predicted
    drafter = NgramDrafter()
    draft = drafter.draft(request, most)
    assert len(draft.token_ids) <= most
    searched = [*request.token_ids[-7:], *predicted, -1, *request.token_ids]
    if draft.token_ids:
        found = [*request.token_ids[-2:], draft.token_ids[0]]
        assert any(searched[i : i + 3] == found for i in range(len(searched) - 2))
    assert drafter.draft(request, most) == draft
    assert NgramDrafter().draft(request, most) == draft
