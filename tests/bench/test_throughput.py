"""Throughput per policy, with the same requests and weights; a changed answer is a failure."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from suites import ignore, last, shown

from neo_desktop.app.bench import throughput as suite
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.throughput import ThroughputReport, requests_of, run_throughput
from neo_desktop.app.bench.workload import (
    TOLERANCES,
    Answer,
    Comparison,
    Run,
    compare,
    fitting,
    run,
)
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.schedule.policies import POLICIES

SMALL = BenchOptions(
    shape="tiny",
    device="cpu",
    dtype="float32",
    gpu_cache_tokens=256,
    cpu_cache_tokens=4096,
    input_tokens=40,
    output_tokens=12,
    num_requests=10,
    repeats=2,
    policies=tuple(POLICIES),
)


@pytest.fixture(scope="module")
def report() -> ThroughputReport:
    return last(run_throughput(SMALL, ignore))


def test_every_policy_answers_everything_alike(report: ThroughputReport) -> None:
    assert [each.policy for each in report.policies] == list(POLICIES)
    for each in report.policies:
        assert each.comparison == Comparison(10, 0, 0)
        assert each.errors == {}
    assert not report.has_failed


def test_without_a_gpu_there_is_one_policy_to_measure() -> None:
    report = last(run_throughput(replace(SMALL, gpu_cache_tokens=None, policies=None, repeats=1), ignore))
    assert [each.policy for each in report.policies] == ["gpu-only"]
    assert not report.imitated
    assert any("nothing to offload" in note for note in report.notes)


def test_requests_that_fit_nowhere_are_left_out_and_counted() -> None:
    report = last(run_throughput(replace(SMALL, input_tokens=240), ignore))
    assert 0 < report.num_requests < 10
    left_out = f"{10 - report.num_requests} requests of more than 256 tokens were left out"
    assert any(left_out in note for note in report.notes)
    with pytest.raises(MemoryError, match="tokens, but 64 fit"):
        fitting(requests_of(replace(SMALL, input_tokens=240), "cpu"), 64)


def test_an_interrupted_run_leaves_the_engine_empty() -> None:
    with Engine.from_pretrained(
        shape="tiny", device="cpu", policy="gpu-only", gpu_cache_tokens=512
    ) as engine:

        def stop(share: float) -> None:
            raise KeyboardInterrupt

        workload = fitting(requests_of(SMALL, "cpu"), 256)
        with pytest.raises(KeyboardInterrupt):
            run(engine, workload.prompts(0, 257), workload.params(), stop)
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        assert all(pool.num_used_blocks == 0 for pool in engine.stats().pools.values())


def answer(*tokens: tuple[int, float], other: tuple[int, float] = (99, -9.0)) -> Answer:
    """Return tokens with their log-probabilities; `other` is the runner-up everywhere."""
    return tuple(
        SampledToken(token, own := TokenLogprob(token, logprob), (own, TokenLogprob(*other)))
        for token, logprob in tokens
    )


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (answer((1, -0.1), (2, -0.7)), Comparison(1, 0, 0)),
        (answer((1, -0.1), (3, -0.7), other=(2, -0.72)), Comparison(0, 1, 0)),  # 2 and 3 nearly tie
        (answer((1, -0.1), (3, -0.2), other=(2, -1.7)), Comparison(0, 0, 1)),  # 3 is clearly ahead
        (answer((1, -0.1), (4, -0.7)), Comparison(0, 0, 1)),  # 2 is not even among the best
        (answer((1, -0.1)), Comparison(0, 0, 1)),  # shorter
    ],
)
def test_answers_may_part_at_near_ties_only(theirs: Answer, expected: Comparison) -> None:
    ours = answer((1, -0.1), (2, -0.7), other=(3, -0.71))
    assert compare([theirs], [ours], TOLERANCES[torch.float16]) == expected


def test_a_changed_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(engine: Engine, prompts: Sequence[Sequence[int]], *args: object) -> Run:
        result = run(engine, prompts, *args)  # type: ignore[arg-type]
        if engine.stats().policy == "neo":
            result.records[0].answer[:] = answer((1, -0.1), (2, -0.1))
        return result

    monkeypatch.setattr(suite, "run", changed)
    report = last(run_throughput(replace(SMALL, policies=("gpu-only", "neo"), repeats=1), ignore))
    assert [each.comparison.changed for each in report.policies] == [0, 1]
    assert report.has_failed
    assert "1 CHANGED" in shown(report.section())
