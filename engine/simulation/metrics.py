"""Results of a simulated run: latencies per request and totals, as numbers and as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The life of one request, in milliseconds of the virtual clock."""

    arrival_ms: float
    first_token_ms: float
    finish_ms: float
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft_ms(self) -> float:
        return self.first_token_ms - self.arrival_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between tokens; None for an output of one token."""
        gaps = self.output_tokens - 1
        return (self.finish_ms - self.first_token_ms) / gaps if gaps else None

    @property
    def latency_per_token_ms(self) -> float:
        """Total time divided by output tokens, as in NEO's figure 6."""
        return (self.finish_ms - self.arrival_ms) / self.output_tokens


@dataclass(slots=True)
class Totals:
    """Running totals of a simulation."""

    num_iterations: int = 0
    num_sequences: int = 0  # summed over the iterations
    num_pipelined: int = 0  # iterations with two sub-batches
    gpu_busy_ms: float = 0.0
    cpu_busy_ms: float = 0.0
    copy_wait_ms: float = 0.0  # device time spent waiting for KV to cross the bus
    iterating_ms: float = 0.0  # clock time during iterations; the rest was waiting for arrivals
    num_preemptions: int = 0
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One policy's run of a workload."""

    policy: str
    finished: Sequence[FinishedRequest]
    num_refused: int  # requests too large for every tier, or for the model's context
    longest_tokens: int  # most prompt and output tokens together; longer requests are refused
    totals: Totals = field(repr=False)

    @property
    def makespan_ms(self) -> float:
        """Time from the first arrival to the last token."""
        if not self.finished:
            return 0.0
        return max(r.finish_ms for r in self.finished) - min(r.arrival_ms for r in self.finished)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.finished)

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens, summed over finished requests."""
        return sum(request.prompt_tokens + request.output_tokens for request in self.finished)

    @property
    def output_tokens_per_s(self) -> float:
        return _ratio(self.output_tokens, self.makespan_ms / 1e3)

    @property
    def latency_per_token_ms(self) -> float:
        """Mean over the requests."""
        return _mean([request.latency_per_token_ms for request in self.finished])

    def to_json(self) -> dict[str, Any]:
        """Return plain data; units are in the names, shares are from 0 to 1."""
        totals = self.totals
        ttft = sorted(request.ttft_ms for request in self.finished)
        tpot = sorted(request.tpot_ms for request in self.finished if request.tpot_ms is not None)
        per_token = sorted(request.latency_per_token_ms for request in self.finished)
        return {
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": _ratio(self.total_tokens, self.makespan_ms / 1e3),
            "ttft_ms": {"p50": percentile(ttft, 50), "p99": percentile(ttft, 99)},
            "tpot_ms": _mean(tpot),
            "tpot_percentiles_ms": {"p50": percentile(tpot, 50), "p99": percentile(tpot, 99)},
            "latency_per_token_ms": {"mean": _mean(per_token), "p99": percentile(per_token, 99)},
            "mean_batch": _ratio(totals.num_sequences, totals.num_iterations),
            "num_finished": len(self.finished),
            "num_refused": self.num_refused,
            "num_iterations": totals.num_iterations,
            "num_pipelined_iterations": totals.num_pipelined,
            "num_preemptions": totals.num_preemptions,
            "num_moves": totals.num_moves,
            "gpu_busy_share": _ratio(totals.gpu_busy_ms, self.makespan_ms),
            "cpu_busy_share": _ratio(totals.cpu_busy_ms, self.makespan_ms),
            "copy_wait_share": _ratio(totals.copy_wait_ms, totals.iterating_ms),
            "makespan_ms": self.makespan_ms,
            "output_tokens": self.output_tokens,
            "total_tokens": self.total_tokens,
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value at or above `percent` of the ordered values; 0 for no values."""
    if not ordered:
        return 0.0
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0
