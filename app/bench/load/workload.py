"""The requests of the load suite: their lengths, and when they come."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from neo_desktop.app.bench.load.options import LoadOptions
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate

_ENOUGH_FOR_A_MEDIAN = 9


class Workload:
    """The lengths of requests, as many as are wanted: always the same ones, the first ones first."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._trace = None if options.trace is None else load_trace(options.trace)

    @property
    def description(self) -> str:
        """The lengths, for people."""
        options = self._options
        if self._trace is None:
            return (
                f"about {options.input_tokens} tokens in and {options.output_tokens} out, uniform within "
                "10 % to either side"
            )
        count = len(self._trace)
        prompt = sum(request.prompt_tokens for request in self._trace) / count
        output = sum(request.output_tokens for request in self._trace) / count
        assert options.trace is not None
        return (
            f"the lengths of {options.trace.name} in its order ({count:,} requests, on average {prompt:.0f} "
            f"tokens in and {output:.0f} out), but not its arrival times"
        )

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests, again from the beginning where a trace is too short, all at once."""
        options = self._options
        if self._trace is None:
            return synthetic(count, options.input_tokens, options.output_tokens, options.seed)
        return [replace(request, arrival_ms=0.0) for request in islice(cycle(self._trace), count)]

    def typical(self) -> WorkloadRequest:
        """Return the request of median length."""
        requests = sorted(
            self._trace or self.take(_ENOUGH_FOR_A_MEDIAN), key=lambda request: request.total_tokens
        )
        return replace(requests[len(requests) // 2], arrival_ms=0.0)


def poisson(requests: Sequence[WorkloadRequest], rate_per_s: float, seed: int) -> list[WorkloadRequest]:
    """Return the requests arriving as a Poisson process, stretched so that the mean rate is exactly this.

    A few dozen requests would else come 10 or 20 % faster or slower, and near the capacity that is all the
    difference.
    """
    arriving = with_rate(requests, rate_per_s, seed)
    span_ms = arriving[-1].arrival_ms
    stretch = (len(arriving) - 1) / rate_per_s * 1e3 / span_ms if span_ms else 1.0
    return [replace(request, arrival_ms=stretch * request.arrival_ms) for request in arriving]
