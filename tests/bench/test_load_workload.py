"""The requests of the load suite: lengths and arrival times."""

import pytest

from neo_desktop.app.bench.load import poisson
from neo_desktop.engine.simulation.workload import synthetic


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
