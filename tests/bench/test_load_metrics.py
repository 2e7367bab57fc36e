"""What the load suite computes from its records is what its words say."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neo_desktop.app.bench.load.client import Limits, RequestRecord
from neo_desktop.app.bench.load.metrics import Failure, Latency, LoadMetrics, summarise

FINISHED = RequestRecord(
    arrival_ms=1000.0,
    sent_ms=1002.0,
    end_ms=1500.0,
    chunks_ms=(1100.0, 1200.0, 1490.0),
    prompt_tokens=30,
    output_tokens=5,
)


def lost(error: str, arrival_ms: float = 0.0) -> RequestRecord:
    return RequestRecord(arrival_ms, arrival_ms, arrival_ms + 50, (), 0, 0, error)


def summary(*records: RequestRecord) -> LoadMetrics:
    return summarise(records, Limits(100.0, 100.0))


def test_the_figures_of_one_request_by_hand() -> None:
    assert FINISHED.ttft_ms == 100.0
    assert FINISHED.tpot_ms == pytest.approx(400 / 4)
    assert FINISHED.itl_ms == [100.0, 290.0]
    assert FINISHED.end_to_end_ms == 500.0


def test_an_answer_of_one_token_has_a_ttft_but_no_tpot() -> None:
    one = replace(FINISHED, chunks_ms=(1100.0,), end_ms=1101.0, output_tokens=1)
    assert one.tpot_ms is None
    assert one.itl_ms == []
    metrics = summary(one)
    assert metrics.tpot is None
    assert metrics.itl is None
    assert metrics.good_share == 1.0


def test_the_figures_of_several_requests_by_hand() -> None:
    slow = replace(FINISHED, arrival_ms=2000.0, sent_ms=2000.0, chunks_ms=(2300.0, 2400.0), end_ms=3000.0)
    metrics = summary(FINISHED, lost("full", 1500.0), slow)
    assert metrics.duration_s == 2.0  # from 1000 to 3000 ms
    assert (metrics.requests, metrics.finished, metrics.lost) == (3, 2, 1)
    assert (metrics.prompt_tokens, metrics.output_tokens) == (60, 10)
    assert metrics.finished_per_s == 1.0
    assert metrics.output_tokens_per_s == 5.0
    assert metrics.total_tokens_per_s == 35.0
    assert metrics.good_share == pytest.approx(1 / 3)  # of all; the slow one's TTFT is 300 ms
    assert metrics.good_per_s == 0.5
    assert metrics.ttft == Latency(100.0, 300.0, 300.0)
    assert metrics.tpot == Latency(100.0, 175.0, 175.0)
    assert metrics.itl == Latency(100.0, 290.0, 290.0)
    assert metrics.end_to_end == Latency(500.0, 1000.0, 1000.0)
    assert metrics.lag_ms == 2.0


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "good"), [(100, 100, 1), (99.9, 100, 0), (100, 99.9, 0), (500, 500, 1)]
)
def test_goodput_needs_both_limits(ttft_ms: float, tpot_ms: float, good: int) -> None:
    assert summarise([FINISHED], Limits(ttft_ms, tpot_ms)).good_share == good


def test_failures_are_grouped_by_reason() -> None:
    records = [lost("full", 1.0), lost("out of time", 2.0), lost("full", 4.0)]
    assert summary(*records).failures == (Failure("full", 2), Failure("out of time", 1))


def test_no_request_and_no_answer_have_no_latency() -> None:
    for metrics in (summary(), summary(lost("full"))):
        assert metrics.ttft is metrics.tpot is metrics.itl is metrics.end_to_end is None
        assert metrics.good_share == metrics.output_tokens_per_s == 0.0


def record_of(times: list[int], error: str, tokens: int) -> RequestRecord:
    """A request that was due, sent, answered in chunks and ended at these times."""
    arrival_ms, sent_ms, *chunks_ms, end_ms = sorted(times)
    return RequestRecord(
        arrival_ms, sent_ms, end_ms, tuple(chunks_ms), tokens, len(chunks_ms) + tokens, error
    )


TIMES = st.lists(st.integers(0, 10_000), min_size=4, max_size=8)
RECORDS = st.lists(
    st.builds(record_of, TIMES, st.sampled_from(("", "full", "out of time")), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)
# A busy machine must not fail a test.
PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def latencies(metrics: LoadMetrics) -> dict[str, Latency | None]:
    names = ("ttft", "tpot", "itl", "end_to_end")
    return {name: getattr(metrics, name) for name in names}


@PATIENT
@given(RECORDS)
def test_every_request_is_counted_once(some: list[RequestRecord]) -> None:
    metrics = summary(*some)
    assert metrics.requests == len(some)
    assert sum(failure.count for failure in metrics.failures) == len(some) - metrics.finished
    assert 0 <= metrics.good_share <= metrics.finished / len(some)


@PATIENT
@given(RECORDS)
def test_percentiles_rise_and_latencies_hold_each_other_in(some: list[RequestRecord]) -> None:
    metrics = summary(*some)
    for latency in latencies(metrics).values():
        if latency is not None:
            assert latency.p50_ms <= latency.p90_ms <= latency.p99_ms
    if metrics.ttft is not None and metrics.end_to_end is not None:
        assert metrics.ttft.p99_ms <= metrics.end_to_end.p99_ms
        assert metrics.end_to_end.p99_ms <= 1e3 * metrics.duration_s + 1e-6


@PATIENT
@given(RECORDS)
def test_a_clock_that_runs_twice_as_fast_doubles_every_latency(some: list[RequestRecord]) -> None:
    doubled = [
        replace(
            record,
            arrival_ms=2 * record.arrival_ms,
            sent_ms=2 * record.sent_ms,
            end_ms=2 * record.end_ms,
            chunks_ms=tuple(2 * ms for ms in record.chunks_ms),
        )
        for record in some
    ]
    for name, latency in latencies(summary(*some)).items():
        twice = latencies(summary(*doubled))[name]
        if latency is None:
            assert twice is None
        else:
            assert twice is not None
            assert (twice.p50_ms, twice.p99_ms) == (2 * latency.p50_ms, 2 * latency.p99_ms)
