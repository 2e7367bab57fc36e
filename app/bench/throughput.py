"""Suite `throughput`: the same requests with the same weights under one policy after the other.

All requests wait at the start and the engine works until the last has its answer, as for a batch job.
Each policy first runs every request once, to warm up and to compare its answers. Then the policies take
turns, with other prompts of the same lengths in every turn, so that nothing is reused from the turn before.

The limit beside the figures is the closed bound of engine/simulation/bound.py, from tables measured in the
same run: perfect overlap, no waiting, no hand-off.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.section import Column, Section, Table
from neo_desktop.app.bench.words import say
from neo_desktop.app.bench.workload import (
    TOLERANCES,
    TOP_LOGPROBS,
    Answer,
    Comparison,
    Run,
    Workload,
    compare,
    fitting,
    run,
)
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import ALL_TIERS
from neo_desktop.engine.loading import choose_device, load
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.profiler import profile
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.workload import WorkloadRequest, synthetic

BASELINE = "gpu-only"  # what offloading is compared with
# Tokens in and out of a synthetic request. On a GPU as in summaries, the case that NEO was made for (its
# section 5.1); a CPU alone takes a second for a hundred tokens of a prompt.
LENGTHS = {"cuda": (400, 50), "cpu": (100, 30)}
MOST_REQUESTS = 256  # as many as run at the same time at most
_PROFILE_SHARE = 0.15  # of the suite's progress
_PILOT_REQUESTS = 2
_LEAST_REQUESTS = 4
_SECONDS = 40.0  # for all runs together, if the number of requests is free


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's runs; medians over the turns where nothing else is said."""

    policy: str
    output_tokens_per_s: float
    ttft_p50_ms: float | None  # over the requests of every turn; None: no request got a token
    tpot_p50_ms: float | None  # the same, over requests with more than one token
    bound_output_tokens_per_s: float  # the policy's limit on this machine
    comparison: Comparison  # with the answers of the first policy
    errors: dict[str, int]  # requests that were given up: reason -> how many, over all runs

    @property
    def bound_share(self) -> float:
        return self.output_tokens_per_s / self.bound_output_tokens_per_s

    @property
    def answers(self) -> str:
        found = self.comparison
        if found.changed:
            return f"{found.changed} CHANGED"
        if self.errors:
            return f"{sum(self.errors.values())} FAILED"
        return f"same ({found.near_ties} near ties)" if found.near_ties else "same"


@dataclass(frozen=True, slots=True)
class ThroughputReport:
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
        return self._of(BASELINE)

    @property
    def has_failed(self) -> bool:
        return any(each.comparison.changed or each.errors for each in self.policies)

    @property
    def fastest(self) -> PolicyResult:
        return max(self.policies, key=lambda each: each.output_tokens_per_s)

    @property
    def gain(self) -> float | None:
        """Speed of `auto` relative to the baseline; None: one of the two was not measured."""
        new, old = self._of("auto"), self.baseline
        return None if new is None or old is None else new.output_tokens_per_s / old.output_tokens_per_s

    @property
    def price(self) -> str:
        """The latency beside a gain: "each chat gets its tokens at 532 ms instead of 82 ms"."""
        new, old = self._of("auto"), self.baseline
        return "" if new is None or old is None else "".join(say("price", new=new, old=old))

    def _of(self, policy: str) -> PolicyResult | None:
        return next((each for each in self.policies if each.policy == policy), None)

    def section(self) -> Section:
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
        title, summary, *notes = say("throughput", report=self, baseline=BASELINE)
        speed = Table.of("Speed", self.policies, speeds)
        return Section(title, summary, (speed,), tuple(notes))


def requests_of(options: BenchOptions, device: str) -> list[WorkloadRequest]:
    """Return as many requests as could be asked for, on this device."""
    prompt_tokens, output_tokens = LENGTHS[device]
    return synthetic(
        options.num_requests or MOST_REQUESTS,
        options.input_tokens or prompt_tokens,
        options.output_tokens or output_tokens,
    )


@dataclass(slots=True)
class _Policy:
    name: str
    parts: EngineParts
    engine: Engine
    answers: tuple[Answer, ...] = ()
    comparison: Comparison = field(default_factory=lambda: Comparison(0, 0, 0))
    runs: list[Run] = field(default_factory=list)


def run_throughput(options: BenchOptions, progress: Progress) -> Iterator[ThroughputReport]:
    """Let the policies take turns; raises what the engine raises."""
    requests = requests_of(options, choose_device(options.device).type)
    progress(0.0, "loading the model")
    model = load(options)
    on_gpu = model.decoder.device.type == "cuda"
    usual = (BASELINE, "auto") if on_gpu or options.gpu_cache_tokens is not None else (BASELINE,)
    names = options.policies or usual
    tiers = {tier for name in names for tier in get_policy(name).tiers}
    parts = take_memory(model, options, [tier for tier in ALL_TIERS if tier in tiers])
    measuring = part(progress, 0.0, _PROFILE_SHARE, "tables: ")
    tables = profile(model.decoder, parts.storage, parts.limits, progress=measuring, streams=model.streams)
    most_tokens = min(
        model.config.max_context_tokens,
        *(sum(parts.num_blocks[tier] for tier in get_policy(name).tiers) * BLOCK_SIZE for name in names),
    )
    suite = _Suite(options, parts, tables, names, fitting(requests, most_tokens))
    try:
        if options.num_requests is None:
            suite.choose_number()
        yield from suite.measure(progress, most_tokens)
    finally:
        for policy in suite.policies:
            policy.engine.close()


@dataclass
class _Suite:
    """The policies, which use the same memory, one after the other, and their requests."""

    options: BenchOptions
    parts: EngineParts
    tables: TableCostModel
    names: Sequence[str]
    workload: Workload

    def __post_init__(self) -> None:
        self.vocab_size = self.parts.model.config.vocab_size
        self.policies = [self._policy(name) for name in self.names]
        self.num_runs = (self.options.repeats + 1) * len(self.names)

    def _policy(self, name: str) -> _Policy:
        own_blocks = {tier: self.parts.num_blocks[tier] for tier in get_policy(name).tiers}
        own = replace(self.parts, num_blocks=own_blocks)
        return _Policy(name, own, Engine.from_parts(own, name, cost_model=self.tables))

    def choose_number(self) -> None:
        """Choose the number of requests so that the runs together last about as long as wanted.

        A few requests take longer each than many at once: the runs become shorter than that, not longer.
        """
        requests = self.workload.requests
        pilot = replace(self.workload, requests=requests[:_PILOT_REQUESTS])
        prompts = pilot.prompts(-1, self.vocab_size)
        seconds = run(self.policies[0].engine, prompts, pilot.params(), lambda share: None).seconds
        wanted_s = self.options.seconds or _SECONDS
        count = round(wanted_s / self.num_runs / (seconds / len(pilot.requests)))
        self.workload = replace(self.workload, requests=requests[: max(count, _LEAST_REQUESTS)])

    def measure(self, progress: Progress, most_tokens: int) -> Iterator[ThroughputReport]:
        """Let every policy answer once, then take turns; a report after each timed run."""
        workload, done = self.workload, 0

        def step(name: str) -> Callable[[float], None]:
            what = f"{name}: {len(workload.requests)} requests"
            return lambda share: progress(
                _PROFILE_SHARE + (1 - _PROFILE_SHARE) * min((done + share) / self.num_runs, 1.0), what
            )

        tolerance = TOLERANCES[self.parts.model.decoder.dtype]
        prompts = workload.prompts(0, self.vocab_size)
        for policy in self.policies:
            first = run(policy.engine, prompts, workload.params(TOP_LOGPROBS), step(policy.name))
            policy.answers = first.answers
            found = compare(first.answers, self.policies[0].answers, tolerance)
            if self.options.cpu_cache_dtype != "auto":
                found = Comparison(found.identical, found.near_ties + found.changed, 0)
            policy.comparison = found
            done += 1
        for turn in range(1, self.options.repeats + 1):
            prompts = workload.prompts(turn, self.vocab_size)
            for policy in self.policies:
                policy.runs.append(run(policy.engine, prompts, workload.params(), step(policy.name)))
                done += 1
                yield self._report(most_tokens)
        progress(1.0, "done")

    def _report(self, most_tokens: int) -> ThroughputReport:
        policies = [each for each in self.policies if each.runs]
        requests, decoder = self.workload.requests, self.parts.model.decoder
        on_gpu = decoder.device.type == "cuda"
        gpu_tokens, cpu_tokens = (
            max(policy.parts.tokens_in(host_memory) for policy in policies) for host_memory in (False, True)
        )
        return ThroughputReport(
            model=self.parts.model.name,
            device=decoder.device.type,
            dtype=str(decoder.dtype).removeprefix("torch."),
            gpu_cache_tokens=gpu_tokens,
            cpu_cache_tokens=cpu_tokens,
            imitated=not on_gpu and any(policy.name != BASELINE for policy in policies),
            num_requests=len(requests),
            prompt_tokens=statistics.fmean(request.prompt_tokens for request in requests),
            output_tokens=statistics.fmean(request.output_tokens for request in requests),
            policies=tuple(map(self._result, policies)),
            notes=say(
                "throughput-notes",
                on_gpu=on_gpu,
                only_baseline=[each.name for each in self.policies] == [BASELINE],
                cpu_cache_dtype=self.options.cpu_cache_dtype,
                num_left_out=self.workload.num_left_out,
                most_tokens=most_tokens,
            ),
        )

    def _result(self, policy: _Policy) -> PolicyResult:
        records = [record for each in policy.runs for record in each.records]
        return PolicyResult(
            policy=policy.name,
            output_tokens_per_s=statistics.median(each.output_tokens / each.seconds for each in policy.runs),
            ttft_p50_ms=_median(each.ttft_ms for each in records if each.answer),
            tpot_p50_ms=_median(ms for each in records if (ms := each.tpot_ms) is not None),
            bound_output_tokens_per_s=self._bound(policy),
            comparison=policy.comparison,
            errors=dict(Counter(each.error for each in records if each.error)),
        )

    def _bound(self, policy: _Policy) -> float:
        """Return the most output tokens per second under this policy."""
        gpu_tokens, cpu_tokens = (
            BLOCK_SIZE
            * sum(n for tier, n in policy.parts.num_blocks.items() if tier.host_attends is host_attends)
            for host_attends in (False, True)
        )
        bound = Bound(self.tables, self.workload.requests, Room(gpu_tokens, cpu_tokens))
        attends = {tier.host_attends for tier in get_policy(policy.name).tiers}
        return bound.output_tokens_per_s(float(False not in attends), float(True in attends))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
