"""The load suite's metrics match their definitions."""

import pytest

from neo_desktop.app.bench.load import Latency, Limits, LoadMetrics, summarise
from neo_desktop.app.bench.workload import Record
from neo_desktop.engine.batch import SampledToken


def record(arrival_ms: float, chunks_ms: list[float], tokens: int, error: str = "") -> Record:
    return Record(arrival_ms, [SampledToken(1)] * tokens, chunks_ms, error)


FINISHED = record(1000.0, [1100.0, 1200.0, 1500.0], 5)


def lost(error: str, arrival_ms: float = 0.0) -> Record:
    return record(arrival_ms, [], 0, error)


def summary(*records: Record) -> LoadMetrics:
    return summarise(records, Limits(100.0, 100.0))


def test_the_figures_of_one_request_by_hand() -> None:
    assert FINISHED.ttft_ms == 100.0
    assert FINISHED.tpot_ms == pytest.approx(400 / 4)
    assert FINISHED.itl_ms == [100.0, 300.0]


def test_an_answer_of_one_token_has_a_ttft_but_no_tpot() -> None:
    metrics = summary(record(1000.0, [1100.0], 1))
    assert metrics.tpot is metrics.itl is None
    assert metrics.good_share == 1.0


def test_the_figures_of_several_requests_by_hand() -> None:
    metrics = summary(FINISHED, lost("full", 1500.0), record(2000.0, [2300.0, 2400.0, 3000.0], 5))
    assert metrics.duration_s == 2.0  # from 1000 to 3000 ms
    assert (metrics.requests, metrics.finished, metrics.output_tokens) == (3, 2, 10)
    assert (metrics.finished_per_s, metrics.output_tokens_per_s) == (1.0, 5.0)
    assert metrics.good_share == pytest.approx(1 / 3)  # one of three requests; the slow one's TTFT is 300 ms
    assert metrics.good_per_s == 0.5
    assert metrics.ttft == Latency(100.0, 300.0, 300.0)
    assert metrics.tpot == Latency(100.0, 175.0, 175.0)
    assert metrics.itl == Latency(100.0, 600.0, 600.0)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "good"), [(100, 100, 1), (99.9, 100, 0), (100, 99.9, 0), (500, 500, 1)]
)
def test_goodput_needs_both_limits(ttft_ms: float, tpot_ms: float, good: int) -> None:
    assert summarise([FINISHED], Limits(ttft_ms, tpot_ms)).good_share == good


def test_no_request_and_no_answer_have_no_latency() -> None:
    for metrics in (summary(), summary(lost("full"))):
        assert metrics.ttft is metrics.tpot is metrics.itl is None
        assert metrics.good_share == metrics.output_tokens_per_s == 0.0
