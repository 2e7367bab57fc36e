"""What a person wants to know first: what runs here, and whether offloading helps."""

from collections.abc import Iterator

from neo_desktop.app.bench.gpu_driver import no_gpu
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.spread import number
from neo_desktop.app.bench.throughput.report import BASELINE, ThroughputReport
from neo_desktop.app.commands.sentences import duration

_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up


def verdict(report: Report) -> tuple[str, ...]:
    """Plain sentences, the most important one first; none if nothing was measured that allows one."""
    compared: list[str] = []
    throughput: list[str] = []
    alone: list[str] = []
    for suite in report.suites:
        if isinstance(suite, ThroughputReport):
            throughput += _throughput(suite, report)
        if isinstance(suite, LoadReport):
            (compared if len(suite.curves) > 1 else alone).extend(_load(suite))
    return (*compared, *throughput, *alone)


def _load(suite: LoadReport) -> Iterator[str]:
    """How many more visitors can be served within the limits."""
    sustained = {curve.name: curve.sustained_per_s for curve in suite.curves if curve.says_enough}
    alone, offloading = sustained.get(BASELINE), sustained.get("auto")
    limits = (
        f"(first token within {suite.limits.ttft_ms:g} ms, each further one within "
        f"{suite.limits.tpot_ms:g} ms)"
    )
    if alone and offloading and offloading >= _WORTH_IT * alone:
        yield (
            f"On this machine offloading lets {offloading / alone:.1f}x more chats run at the same speed: "
            f"{number(offloading)} instead of {number(alone)} requests per second {limits}."
            f"{_price(suite, alone, offloading)}"
        )
    elif alone and offloading:
        yield (
            f"With and without offloading, about {number(offloading)} requests per second are answered in "
            f"time {limits}."
        )
    elif len(suite.curves) == len(sustained) == 1 and (only := next(iter(sustained.values()))) is not None:
        yield f"Up to {number(only)} requests per second are answered in time {limits}."


def _price(suite: LoadReport, alone: float, offloading: float) -> str:
    """At what pace a chat gets its tokens at either rate."""
    paces = []
    for name, rate in (("auto", offloading), (BASELINE, alone)):
        (curve,) = (each for each in suite.curves if each.name == name)
        point = next(each for each in curve.points if each.rate_per_s == rate)
        latency = point.median_latency("tpot")
        if latency is None:
            return ""
        paces.append(duration(latency.p50_ms))
    return f" Each chat then gets its tokens at {paces[0]} instead of {paces[1]}."


def _throughput(suite: ThroughputReport, report: Report) -> Iterator[str]:
    changed = [each for each in suite.policies if each.changed_answers]
    for each in changed:
        yield f"FAILURE: {each.policy} changed {each.changed_answers} answers. Please report this."
    failed = {each.policy: sum(each.errors.values()) for each in suite.policies if each.errors}
    for policy, count in failed.items():
        yield f"FAILURE: {policy} gave up {count} requests: see the reasons in report.json."
    if suite.imitated:
        yield "The GPU was imitated: whether offloading helps can only be seen on a computer with a GPU."
    elif suite.device != "cuda":
        best, pace_ms = suite.fastest, suite.fastest.tpot_p50_ms
        pace = "" if pace_ms is None else f"; each chat gets its tokens at {duration(pace_ms)}"
        why = no_gpu(report.machine.gpu_note)
        yield f"{why}, so there is nothing to offload from: the CPU does the whole work."
        yield (
            f"It writes {number(best.output_tokens_per_s)} tokens per second with {suite.model} when "
            f"{suite.num_requests} requests come at once{pace}."
        )
    elif (gain := suite.gain) is not None and suite.baseline is not None:
        if gain >= _WORTH_IT:
            yield (
                f"On this machine offloading makes {suite.model} {gain:.1f}x as fast when "
                f"{suite.num_requests} requests come at once: "
                f"{number(gain * suite.baseline.output_tokens_per_s)} instead of "
                f"{number(suite.baseline.output_tokens_per_s)} tokens per second."
            )
            if suite.price:
                yield f"The price: {suite.price}."
        else:
            yield (
                f"Offloading does not help {suite.model} here ({gain:.2f}x of {BASELINE}): {_why_not(suite)}."
            )


def _why_not(suite: ThroughputReport) -> str:
    baseline = suite.baseline
    needed = suite.num_requests * (suite.prompt_tokens + suite.output_tokens)
    if needed <= suite.gpu_cache_tokens:
        return (
            f"the GPU's memory holds all {suite.num_requests} requests ({needed:.0f} tokens, room for "
            f"{suite.gpu_cache_tokens})"
        )
    if baseline is not None and baseline.device_busy_share > 0.9:
        return "with what fits into its memory the GPU is busy already, and more requests at once do not help"
    return "what the CPU could compute beside the GPU is less than what handing it over costs"
