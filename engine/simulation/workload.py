"""Synthetic workloads: requests as lengths and arrival times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

SPREAD = 0.1  # of synthetic lengths to either side, as in NEO, section 5.1


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Arrival time and lengths of one request."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """The longest context, including the last output token."""
        return self.prompt_tokens + self.output_tokens


def synthetic(count: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[WorkloadRequest]:
    """Make requests with lengths uniform in 0.9 to 1.1 times the given, all at once (NEO, section 5.1)."""
    if min(count, prompt_tokens, output_tokens) < 1:
        raise ValueError("a synthetic workload needs at least one request, input token and output token")
    rng = random.Random(seed)
    prompts, outputs = _spread(prompt_tokens), _spread(output_tokens)
    return [WorkloadRequest(0.0, rng.randint(*prompts), rng.randint(*outputs)) for _ in range(count)]


def with_rate(
    requests: Sequence[WorkloadRequest], requests_per_s: float, seed: int = 0
) -> list[WorkloadRequest]:
    """Return the same requests, in the same order, arriving as a Poisson process; `inf`: all at once.

    Raises:
        ValueError: the rate is not positive.
    """
    if not requests_per_s > 0:
        raise ValueError(f"a rate must be above 0 requests per second, got {requests_per_s:g}")
    if requests_per_s == inf:
        return [replace(request, arrival_ms=0.0) for request in requests]
    rng = random.Random(seed)
    arrival_ms = 0.0
    arriving = []
    for request in requests:
        arriving.append(replace(request, arrival_ms=arrival_ms))
        arrival_ms += rng.expovariate(requests_per_s) * 1e3
    return arriving


def _spread(tokens: int) -> tuple[int, int]:
    return max(ceil((1 - SPREAD) * tokens), 1), max(floor((1 + SPREAD) * tokens), 1)
