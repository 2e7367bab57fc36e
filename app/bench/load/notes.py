"""What the figures of the load suite mean, and what they cannot say."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from neo_desktop.app.bench.load.curve import ENOUGH_REQUESTS, LoadCurve, LoadPoint
from neo_desktop.app.bench.load.target import Outcome
from neo_desktop.app.bench.spread import number

MOST_CLIENT_LAG_MS = 10.0  # at p99; a client that is later is part of what it measures
KEPT_UP = 0.9  # of the rate: fewer finished requests per second may mean that a queue grows
CACHED_SHARE = 0.01  # of the prompts' tokens; more of them reused make prompts look cheap

DEFINITIONS = (
    "Requests come as a Poisson process and do not wait for each other, as from many people who know nothing "
    "of each other.",
    "TTFT: from the moment a request is due to its first chunk, waiting included.",
    "TPOT: from a request's first chunk to its end, divided by its output tokens less one.",
    "ITL: the gap between two chunks of an answer, over all gaps of all answers.",
    "End to end: from the moment a request is due to the end of its answer; per output token: divided by "
    "their number.",
    "p50, p90 and p99: half, 90 % and 99 % took that long at most; of few requests p99 is the worst one.",
    "Good: finished within both limits; good/s is the goodput. Lost: refused, failed or unfinished.",
    "Latencies and tokens are those of finished requests. Rates are over the time from the first arrival to "
    "the last end, so that filling and emptying are in them.",
)
ENGINE_DEFINITIONS = (
    "Mean batch: output tokens per iteration. On the CPU: the share of output tokens whose attention the CPU "
    "computed; the first token of a request comes from its prompt and is never among them."
)


def notes(workload: str, curves: Sequence[LoadCurve], repeats: int) -> Iterator[str]:
    """Yield what was found out, then what the words mean."""
    yield f"Workload: {workload}."
    shared = set[str].intersection(*(set(curve.notes) for curve in curves)) if curves else set()
    yield from (note for curve in curves[:1] for note in curve.notes if note in shared)
    for curve in curves:
        yield from (f"{curve.name}: {note}" for note in curve.notes if note not in shared)
        for name, point in curve.rows():
            yield from (f"{curve.name}, {name}: {note}" for note in _of_point(curve, point))
    points = [point for curve in curves for point in curve.points]
    if any(point.load_share is not None for point in points):
        first = curves[0].name
        yield f"Rates were chosen as shares of what {first} delivers when many requests come at once."
    if repeats > 1:
        yield f"Figures are medians of {repeats} repeats with different arrival times. {_spread(points)}"
    yield from DEFINITIONS
    if any(point.engine_figures for point in points):
        yield ENGINE_DEFINITIONS


def _of_point(curve: LoadCurve, point: LoadPoint) -> Iterator[str]:
    yield from _losses(point, curve.drain_s)
    lags = [lag.p99_ms for run in point.runs if (lag := run.metrics.client_lag) is not None]
    if max(lags, default=0.0) > MOST_CLIENT_LAG_MS:
        yield f"the client itself sent up to {max(lags):.0f} ms late (p99); that is in TTFT and end to end."
    if point in curve.points and min(run.metrics.requests for run in point.runs) < ENOUGH_REQUESTS:
        yield "too few requests to say much; measure for longer, or with shorter requests."
    is_highest = point in curve.points and point.rate_per_s == curve.sustained_per_s
    finished_per_s = point.median("finished_per_s")
    if is_highest and finished_per_s < KEPT_UP * point.rate_per_s:
        yield (
            f"kept the limits, but {number(finished_per_s)} requests/s were finished. Either the queue "
            "grows, which a longer run would show, or the run is short beside the latency."
        )
    prompt_tokens = sum(run.metrics.prompt_tokens for run in point.runs)
    cached = sum(run.metrics.cached_tokens for run in point.runs) / max(prompt_tokens, 1)
    if cached > CACHED_SHARE:
        yield f"{cached:.0%} of the prompts' tokens were not computed but came from a cache."


def _losses(point: LoadPoint, drain_s: float) -> Iterator[str]:
    """Yield a note for every reason for which requests were lost."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for failure in (failure for run in point.runs for failure in run.metrics.failures):
        counts[failure.outcome, failure.reason] += failure.count
        examples.setdefault((failure.outcome, failure.reason), failure.example)
    for (outcome, reason), count in counts.most_common():
        if outcome == Outcome.UNFINISHED:
            yield (
                f"{count} unfinished {number(drain_s)} s after the last arrival and ended then. The slowest "
                "requests are therefore missing in the latencies, which look better than they are."
            )
        else:
            yield f"{count} {outcome} ({reason}). The first: {examples[outcome, reason]}"


def _spread(points: Sequence[LoadPoint]) -> str:
    """Say how far the repeats lie apart at the rate where they do most."""
    spreads: dict[str, list[float]] = {}
    for point in points:
        metrics = [run.metrics for run in point.runs]
        for name, values in {
            "TTFT p50": [each.ttft.p50_ms for each in metrics if each.ttft],
            "TPOT p50": [each.tpot.p50_ms for each in metrics if each.tpot],
            "output tokens/s": [each.output_tokens_per_s for each in metrics if each.output_tokens_per_s],
        }.items():
            if len(values) > 1:
                spreads.setdefault(name, []).append((max(values) - min(values)) / median(values))
    parts = [f"{name} {max(found):.0%}" for name, found in spreads.items()]
    return f"From lowest to highest, at the rate with most spread: {', '.join(parts)}." if parts else ""
