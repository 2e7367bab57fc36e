"""What the load suite is asked to do: its settings, and the requests that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from neo_desktop.app.bench.checks import above_zero, at_least, each_once
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate

_ENOUGH_FOR_A_MEDIAN = 9


@dataclass(frozen=True, slots=True)
class LoadOptions(EngineOptions):
    """Settings; with `url` a running server is measured and no engine is loaded.

    A run takes about `seconds` and a drain per rate, repeat and policy, and as much as two more of them per
    policy to find the capacity. For a quick run: `seconds=3, load_shares=(0.5, 0.75, 1.0)`.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
    """

    trace: Path | None = None  # lengths from a file, see engine/simulation/workload.py
    input_tokens: int = 256  # without a trace: lengths uniform in 0.9 to 1.1 of these
    output_tokens: int = 64
    num_requests: int | None = None  # per rate; None: as many as come in `seconds`
    rates: tuple[float, ...] | None = None  # requests per second; None: `load_shares` of the capacity
    load_shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)
    seconds: float = 6.0  # in which the requests of a rate come
    drain_seconds: float | None = None  # for open requests at the end; None: see `suite.drain_seconds`
    repeats: int = 1  # each with other arrival times
    warm_up: int = 2  # requests sent first, and not counted
    seed: int = 0
    ttft_limit_ms: float = 2000.0  # what a request must keep to count for goodput
    tpot_limit_ms: float = 200.0
    policies: tuple[str, ...] | None = None  # None: see `suite.policies`
    url: str | None = None
    api_key: str | None = None
    url_model: str | None = None  # None: the first that the server lists

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        at_least(self, 1, "input_tokens", "output_tokens", "repeats", "num_requests")
        at_least(self, 0, "warm_up")
        above_zero(self, "seconds", "ttft_limit_ms", "tpot_limit_ms", "drain_seconds", "rates", "load_shares")
        each_once(self, "rates", "load_shares", "policies")
        for policy in self.policies or ():
            get_policy(policy)
        if self.url is not None and self.policies is not None:
            raise ValueError("a server has its own policy: give either policies or url")
        if self.url is None and (self.api_key or self.url_model):
            raise ValueError("api_key and url_model belong to a running server: give its url, too")


class Workload:
    """The lengths of requests, as many as are wanted: always the same ones, the first ones first."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._trace = None if options.trace is None else load_trace(options.trace)

    @property
    def description(self) -> str:
        """The lengths, for people."""
        options, trace = self._options, self._trace
        if options.trace is None or trace is None:
            lengths = f"about {options.input_tokens} tokens in and {options.output_tokens} out"
            return f"{lengths}, uniform within 10 % to either side"
        prompt = sum(request.prompt_tokens for request in trace) / len(trace)
        output = sum(request.output_tokens for request in trace) / len(trace)
        return (
            f"the lengths of {options.trace.name} in its order ({len(trace):,} requests, on average "
            f"{prompt:.0f} tokens in and {output:.0f} out), but not its arrival times"
        )

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests, again from the beginning where a trace is too short, all at once."""
        options = self._options
        if self._trace is None:
            return synthetic(count, options.input_tokens, options.output_tokens, options.seed)
        return [replace(request, arrival_ms=0.0) for request in islice(cycle(self._trace), count)]

    def typical(self) -> WorkloadRequest:
        """Return the request of median length."""
        requests = self._trace or self.take(_ENOUGH_FOR_A_MEDIAN)
        by_length = sorted(requests, key=lambda request: request.total_tokens)
        return replace(by_length[len(by_length) // 2], arrival_ms=0.0)


def poisson(requests: Sequence[WorkloadRequest], rate_per_s: float, seed: int) -> list[WorkloadRequest]:
    """Return the requests arriving as a Poisson process, stretched so that the mean rate is exactly this.

    A few dozen requests would else come 10 or 20 % faster or slower, and near the capacity that is all the
    difference.
    """
    arriving = with_rate(requests, rate_per_s, seed)
    span_ms = arriving[-1].arrival_ms
    stretch = (len(arriving) - 1) / rate_per_s * 1e3 / span_ms if span_ms else 1.0
    return [replace(request, arrival_ms=stretch * request.arrival_ms) for request in arriving]
