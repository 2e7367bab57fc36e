"""Results of the suite."""

from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.charts import bars
from neo_desktop.app.bench.section import Column, Plot, Section, Table
from neo_desktop.app.bench.words import say
from neo_desktop.app.words import number

BASELINE = "gpu-only"  # what offloading is compared with


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's runs; medians over the turns where nothing else is said."""

    policy: str
    output_tokens_per_s: float
    lowest_output_tokens_per_s: float  # over the turns
    highest_output_tokens_per_s: float
    seconds: float  # a run
    ttft_p50_ms: float | None  # over the requests of every turn; None: no request got a token
    tpot_p50_ms: float | None  # the same, over requests with more than one token
    turns: int
    tokens_per_iteration: float  # output tokens: the mean batch of decodes
    cpu_decode_share: float  # output tokens whose attention the CPU computed
    double_iteration_share: float  # iterations with two sub-batches
    outside_ms: float  # between two iterations, when nothing is computed: planning, bookkeeping; the mean
    num_preemptions: float
    device_busy_share: float  # of the time, over all turns
    cpu_busy_share: float  # with decode attention
    overlap_share: float  # of the time: both at once
    bound_output_tokens_per_s: float | None  # the policy's limit on this machine.
    identical_answers: int  # beside those of the first policy
    near_tie_answers: int  # part from them where two tokens were nearly equally probable
    changed_answers: int  # a failure
    errors: dict[str, int]  # requests that were given up: reason -> how many, over all runs

    @property
    def bound_share(self) -> float | None:
        """Share of the bound that was reached."""
        bound = self.bound_output_tokens_per_s
        return None if bound is None else self.output_tokens_per_s / bound

    @property
    def answers(self) -> str:
        """Comparison with the baseline."""
        if self.changed_answers:
            return f"{self.changed_answers} CHANGED"
        if self.errors:
            return f"{sum(self.errors.values())} FAILED"
        return f"same ({self.near_tie_answers} near ties)" if self.near_tie_answers else "same"


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """All policies on one workload."""

    model: str
    device: str
    dtype: str
    gpu_cache_tokens: int  # 0: none
    cpu_cache_tokens: int
    imitated: bool  # both caches are in host memory, and the CPU stands in for the GPU
    num_requests: int
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    policies: tuple[PolicyResult, ...]
    notes: tuple[str, ...]
    suite: Literal["throughput"] = "throughput"

    @property
    def baseline(self) -> PolicyResult | None:
        """The policy that keeps all KV on the device."""
        return next((each for each in self.policies if each.policy == BASELINE), None)

    @property
    def has_failed(self) -> bool:
        """True if a policy changed an answer or gave one up."""
        return any(each.changed_answers or each.errors for each in self.policies)

    @property
    def fastest(self) -> PolicyResult:
        """The policy with the most output tokens per second."""
        return max(self.policies, key=lambda each: each.output_tokens_per_s)

    @property
    def offloading(self) -> PolicyResult | None:
        """The policy that uses both memories by the fastest prediction."""
        return next((each for each in self.policies if each.policy == "auto"), None)

    @property
    def gain(self) -> float | None:
        """Speed of `auto` relative to the baseline; None: one of the two was not measured."""
        if self.offloading is None or self.baseline is None:
            return None
        return self.offloading.output_tokens_per_s / self.baseline.output_tokens_per_s

    @property
    def price(self) -> str:
        """The latency beside a gain: "each chat gets its tokens at 532 ms instead of 82 ms"."""
        new, old = self.offloading, self.baseline
        return "".join(say("price", new=new, old=old)) if new is not None and old is not None else ""

    def section(self) -> Section:
        """A row and a bar for each policy."""
        title, summary, *notes = say("throughput", report=self, baseline=BASELINE)
        bounds = [each.bound_output_tokens_per_s for each in self.policies]
        rows = [(each.policy, each.output_tokens_per_s, _label(each)) for each in self.policies]
        known = " The line across is the limit: no schedule can be faster." if any(bounds) else ""
        shown = f"Output tokens per second by policy, and ms per token of each chat.{known}"
        return Section(title, summary, self._tables(), (Plot(shown, bars(rows, bounds)),), tuple(notes))

    def _tables(self) -> tuple[Table, Table]:
        baseline = self.baseline
        speeds: dict[str, Column] = {
            "policy": "policy",
            "output tokens/s": "output_tokens_per_s",
            f"against {BASELINE}": lambda each: (
                baseline and f"{each.output_tokens_per_s / baseline.output_tokens_per_s:.2f}x"
            ),
            "ms per token": "tpot_p50_ms",
            "ms to first": "ttft_p50_ms",
            "limit": "bound_output_tokens_per_s",
            "of limit": "bound_share:.0%",
            "answers": "answers",
        }
        insides = {
            "policy": "policy",
            "batch": "tokens_per_iteration:.1f",
            "on CPU": "cpu_decode_share:.0%",
            "two sub-batches": "double_iteration_share:.0%",
            "GPU busy": "device_busy_share:.0%",
            "CPU busy": "cpu_busy_share:.0%",
            "both": "overlap_share:.0%",
            "outside ms": "outside_ms",
            "preempted": "num_preemptions:.0f",
        }
        return (
            Table.of("Speed", self.policies, speeds),
            Table.of("What the engine did", self.policies, insides),
        )


def _label(result: PolicyResult) -> str:
    pace = "" if result.tpot_p50_ms is None else f", {number(result.tpot_p50_ms)} ms"
    return number(result.output_tokens_per_s) + pace
