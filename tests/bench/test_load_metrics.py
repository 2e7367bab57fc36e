"""The load suite's metrics match their definitions."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_failures_are_grouped_by_reason() -> None:
    assert summary(lost("full"), lost("out of time"), lost("full")).failures == {"full": 2, "out of time": 1}


def test_no_request_and_no_answer_have_no_latency() -> None:
    for metrics in (summary(), summary(lost("full"))):
        assert metrics.ttft is metrics.tpot is metrics.itl is None
        assert metrics.good_share == metrics.output_tokens_per_s == 0.0


def record_of(times: list[int], error: str, tokens: int) -> Record:
    """Return the record of a request with this due time and these chunk times."""
    arrival_ms, *chunks_ms = sorted(times)
    return record(arrival_ms, list(map(float, chunks_ms)), len(chunks_ms) + tokens, error)


TIMES = st.lists(st.integers(0, 10_000), min_size=4, max_size=8)
RECORDS = st.lists(
    st.builds(record_of, TIMES, st.sampled_from(("", "full", "out of time")), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)
# A busy machine must not fail a test.
PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def latencies(metrics: LoadMetrics) -> dict[str, Latency | None]:
    names = ("ttft", "tpot", "itl")
    return {name: getattr(metrics, name) for name in names}


@PATIENT
@given(RECORDS)
def test_every_request_is_counted_once(some: list[Record]) -> None:
    metrics = summary(*some)
    assert metrics.requests == len(some)
    assert sum(metrics.failures.values()) == len(some) - metrics.finished
    assert 0 <= metrics.good_share <= metrics.finished / len(some)


@PATIENT
@given(RECORDS)
def test_percentiles_rise_and_latencies_hold_each_other_in(some: list[Record]) -> None:
    metrics = summary(*some)
    for latency in latencies(metrics).values():
        if latency is not None:
            assert latency.p50_ms <= latency.p90_ms <= latency.p99_ms


@PATIENT
@given(RECORDS)
def test_a_clock_that_runs_twice_as_fast_doubles_every_latency(some: list[Record]) -> None:
    doubled = [
        record(2 * each.arrival_ms, [2 * ms for ms in each.chunks_ms], len(each.answer), each.error)
        for each in some
    ]
    for name, latency in latencies(summary(*some)).items():
        twice = latencies(summary(*doubled))[name]
        if latency is None:
            assert twice is None
        else:
            assert twice is not None
            assert (twice.p50_ms, twice.p99_ms) == (2 * latency.p50_ms, 2 * latency.p99_ms)
