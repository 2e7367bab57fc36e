"""Policies in turn, on one model and one pair of caches."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.throughput.report import BASELINE, PolicyResult, ThroughputReport
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
from neo_desktop.engine.execute.timeline import Span, Timeline, busy_ns, overlap_ns
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import ALL_TIERS
from neo_desktop.engine.loading import choose_device, load
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.profiler import profile
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic

# Tokens in and out of a synthetic request, unless they are given. On a GPU as in summaries, the case that NEO
# was made for (its section 5.1); a CPU alone takes a second for a hundred tokens of a prompt.
LENGTHS = {"cuda": (400, 50), "cpu": (100, 30)}
MOST_REQUESTS = 256  # as many as run at the same time at most
_PROFILE_SHARE = 0.15  # of the suite's progress
_PILOT_REQUESTS = 2
_LEAST_REQUESTS = 4
_REPEATS = 3
_SECONDS, _QUICK_SECONDS = 60.0, 40.0  # for all runs together, if the number of requests is free


def lengths(options: BenchOptions, device: str) -> list[WorkloadRequest]:
    """Return as many requests as could be asked for; raises what `load_trace` raises.

    Args:
        device: "cpu" or "cuda", for the lengths of requests that are made up.
    """
    count = options.num_requests or MOST_REQUESTS
    if options.trace is not None:
        return load_trace(options.trace)[:count]
    asked = (options.input_tokens, options.output_tokens)
    prompt, output = (given or usual for given, usual in zip(asked, LENGTHS[device], strict=True))
    return synthetic(count, prompt, output, options.seed)


@dataclass(slots=True)
class _Policy:
    """One policy's engine and what its runs brought so far."""

    name: str
    parts: EngineParts
    timeline: Timeline
    engine: Engine
    answers: tuple[Answer, ...] = ()
    comparison: Comparison = field(default_factory=lambda: Comparison(0, 0, 0))
    runs: list[Run] = field(default_factory=list)
    shares: list[tuple[float, float, float]] = field(default_factory=list)  # per run: see `_busy_shares`


def run_throughput(options: BenchOptions, progress: Progress) -> Iterator[ThroughputReport]:
    """Let the policies take turns; raises what the engine and the reader of a trace raise."""
    requests = lengths(options, choose_device(options.device).type)
    progress(0.0, "loading the model")
    model = load(options)
    on_gpu = model.decoder.device.type == "cuda"
    names = (
        tuple(options.policies or ())
        or (BASELINE, "auto")[: 1 + (on_gpu or options.gpu_cache_tokens is not None)]
    )
    tiers = {tier for name in names for tier in get_policy(name).tiers}
    parts = take_memory(model, options, [tier for tier in ALL_TIERS if tier in tiers])

    def profiled(share: float, what: str) -> None:
        progress(_PROFILE_SHARE * share, f"tables: {what}")

    tables = profile(model.decoder, parts.storage, parts.limits, progress=profiled, streams=model.streams)
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


class _Suite:
    """The policies, which use the same memory, one after the other, and their requests."""

    def __init__(
        self,
        options: BenchOptions,
        parts: EngineParts,
        tables: TableCostModel,
        names: Sequence[str],
        workload: Workload,
    ) -> None:
        self.options, self.parts, self.tables, self.workload = options, parts, tables, workload
        self.repeats = options.repeats or _REPEATS
        self.vocab_size = parts.model.config.vocab_size
        self.policies = [self._policy(name) for name in names]

    def _policy(self, name: str) -> _Policy:
        own_blocks = {tier: self.parts.num_blocks[tier] for tier in get_policy(name).tiers}
        own, timeline = replace(self.parts, num_blocks=own_blocks), Timeline()
        engine = Engine.from_parts(own, name, cost_model=self.tables, timeline=timeline)
        return _Policy(name, own, timeline, engine)

    def choose_number(self) -> None:
        """Choose the number of requests so that the runs together last about as long as wanted.

        A few requests take longer each than many at once: the runs become shorter than that, not longer.
        """
        options, requests = self.options, self.workload.requests
        pilot = replace(self.workload, requests=requests[:_PILOT_REQUESTS])
        prompts = pilot.prompts(options.seed, -1, self.vocab_size)
        seconds = run(self.policies[0].engine, prompts, pilot.params(), lambda share: None).seconds
        num_runs = (self.repeats + 1) * len(self.policies)
        wanted_s = options.seconds or (_QUICK_SECONDS if options.is_quick else _SECONDS)
        count = round(wanted_s / num_runs / (seconds / len(pilot.requests)))
        self.workload = replace(self.workload, requests=requests[: max(count, _LEAST_REQUESTS)])

    def measure(self, progress: Progress, most_tokens: int) -> Iterator[ThroughputReport]:
        """Let every policy answer once, then take turns; a report after each timed run."""
        options, workload, done = self.options, self.workload, 0
        num_runs = (self.repeats + 1) * len(self.policies)

        def step(name: str) -> Callable[[float], None]:
            what = f"{name}: {len(workload.requests)} requests"
            return lambda share: progress(
                _PROFILE_SHARE + (1 - _PROFILE_SHARE) * min((done + share) / num_runs, 1.0), what
            )

        tolerance = TOLERANCES[self.parts.model.decoder.dtype]
        prompts = workload.prompts(options.seed, 0, self.vocab_size)
        for policy in self.policies:
            first = run(policy.engine, prompts, workload.params(TOP_LOGPROBS), step(policy.name))
            policy.answers = first.answers
            found = compare(first.answers, self.policies[0].answers, tolerance)
            if options.cpu_cache_dtype != "auto":
                found = Comparison(found.identical, found.near_ties + found.changed, 0)
            policy.comparison = found
            done += 1
        for turn in range(1, self.repeats + 1):
            prompts = workload.prompts(options.seed, turn, self.vocab_size)
            for policy in self.policies:
                policy.timeline.take()
                policy.runs.append(run(policy.engine, prompts, workload.params(), step(policy.name)))
                policy.shares.append(_busy_shares(policy.timeline.take()))
                done += 1
                yield self._report(most_tokens)
        progress(1.0, "done")

    def _report(self, most_tokens: int) -> ThroughputReport:
        policies = [each for each in self.policies if each.runs]
        requests, decoder = self.workload.requests, self.parts.model.decoder
        on_gpu = decoder.device.type == "cuda"
        names = [each.name for each in self.policies]

        def tokens(host_memory: bool) -> int:
            return max(policy.parts.tokens_in(host_memory) for policy in policies)

        return ThroughputReport(
            model=self.parts.model.name,
            device=decoder.device.type,
            dtype=str(decoder.dtype).removeprefix("torch."),
            gpu_cache_tokens=tokens(host_memory=False),
            cpu_cache_tokens=tokens(host_memory=True),
            imitated=not on_gpu and any(policy.name != BASELINE for policy in policies),
            num_requests=len(requests),
            prompt_tokens=statistics.fmean(request.prompt_tokens for request in requests),
            output_tokens=statistics.fmean(request.output_tokens for request in requests),
            policies=tuple(map(self._result, policies)),
            notes=say(
                "throughput-notes",
                on_gpu=on_gpu,
                only_baseline=names == [BASELINE],
                cpu_cache_dtype=self.options.cpu_cache_dtype,
                num_left_out=self.workload.num_left_out,
                most_tokens=most_tokens,
            ),
        )

    def _result(self, policy: _Policy) -> PolicyResult:
        runs = policy.runs
        speeds = [each.output_tokens / each.seconds for each in runs]
        device, cpu, both = (statistics.median(shares) for shares in zip(*policy.shares, strict=True))
        outputs = sum(each.output_tokens for each in runs)
        records = [record for each in runs for record in each.records]

        def total(counter: str) -> float:
            return sum(each.counted(counter) for each in runs)

        iterations = max(total("num_iterations"), 1)
        return PolicyResult(
            policy=policy.name,
            output_tokens_per_s=statistics.median(speeds),
            lowest_output_tokens_per_s=min(speeds),
            highest_output_tokens_per_s=max(speeds),
            seconds=statistics.median(each.seconds for each in runs),
            ttft_p50_ms=_median(each.ttft_ms for each in records if each.answer),
            tpot_p50_ms=_median(ms for each in records if (ms := each.tpot_ms) is not None),
            turns=len(runs),
            tokens_per_iteration=outputs / iterations,
            cpu_decode_share=total("num_cpu_decodes") / max(outputs, 1),
            double_iteration_share=total("num_double_iterations") / iterations,
            outside_ms=total("outside_s") / iterations * 1e3,
            num_preemptions=statistics.median(each.counted("num_preemptions") for each in runs),
            device_busy_share=device,
            cpu_busy_share=cpu,
            overlap_share=both,
            bound_output_tokens_per_s=self._bound(policy),
            identical_answers=policy.comparison.identical,
            near_tie_answers=policy.comparison.near_ties,
            changed_answers=policy.comparison.changed,
            errors=dict(Counter(each.error for each in records if each.error)),
        )

    def _bound(self, policy: _Policy) -> float:
        """Return the most output tokens per second under this policy."""
        tiers = get_policy(policy.name).tiers
        gpu_tokens, cpu_tokens = (
            BLOCK_SIZE
            * sum(n for tier, n in policy.parts.num_blocks.items() if tier.host_attends is host_attends)
            for host_attends in (False, True)
        )
        bound = Bound(self.tables, self.workload.requests, Room(gpu_tokens, cpu_tokens))
        attends = {tier.host_attends for tier in tiers}
        return bound.output_tokens_per_s(float(False not in attends), float(True in attends))


def _busy_shares(spans: Sequence[Span]) -> tuple[float, float, float]:
    """Return the shares of the time in which the device, the CPU's attention and both were busy."""
    if not spans:  # not a single request was taken
        return 0.0, 0.0, 0.0
    period_ns = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
    busy = (busy_ns(spans, "device"), busy_ns(spans, "cpu"), overlap_ns(spans, "device", "cpu"))
    device, cpu, both = (each / period_ns for each in busy)
    return device, cpu, both


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
