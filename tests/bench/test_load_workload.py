"""The requests of the load suite: lengths and arrival times."""

from pathlib import Path

import pytest

from neo_desktop.app.bench.load import poisson, run_load
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.workload import Lengths
from neo_desktop.engine.simulation.workload import WorkloadError, synthetic


def ignore(share: float, what: str) -> None:
    pass


@pytest.mark.parametrize(("count", "rate"), [(2, 3.0), (50, 0.1), (50, 1000.0)])
def test_arrivals_have_exactly_the_mean_rate(count: int, rate: float) -> None:
    requests = synthetic(count, 10, 10)
    arriving = poisson(requests, rate)
    times = [request.arrival_ms for request in arriving]
    assert times[0] == 0
    assert times == sorted(times)
    assert (count - 1) / times[-1] * 1e3 == pytest.approx(rate)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in arriving]
    assert lengths == [(request.prompt_tokens, request.output_tokens) for request in requests]


def test_one_request_comes_at_once() -> None:
    assert [request.arrival_ms for request in poisson(synthetic(1, 10, 10), 5.0)] == [0.0]


def test_a_trace_gives_lengths_and_begins_again_when_it_ends(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.json"
    trace.write_text('[{"prompt": 3, "max_tokens": 5}, {"prompt": 30, "max_tokens": 7}]')
    lengths = Lengths(BenchOptions(trace=trace), (256, 64))
    assert [request.prompt_tokens for request in lengths.take(5)] == [3, 30, 3, 30, 3]
    trace.write_text("nothing")
    with pytest.raises(WorkloadError, match=r"lengths\.json"):
        next(run_load(BenchOptions(trace=trace), ignore))
