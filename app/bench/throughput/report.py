"""What the suite found."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from neo_desktop.app.bench.charts import BLUE, LIGHT_GREY, ORANGE, legend, tidy
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Table, number, size
from neo_desktop.app.bench.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BASELINE = "gpu-only"  # what offloading is compared with


_LANES = ("device", "to-host", "cpu", "to-device", "swap")
_LANE_NAMES = {"device": "GPU", "to-host": "q, k, v to CPU", "cpu": "CPU attention", "to-device": "o to GPU"}
_COLOURS = {-1: LIGHT_GREY, 0: BLUE, 1: ORANGE}
_UNDER_LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_HATCHES = {-1: "", 0: "", 1: "///"}


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A lane was busy; of the iteration and the layers that are shown."""

    lane: str
    name: str
    sub_batch: int  # -1: of no sub-batch
    start_ms: float  # since the first of these spans began
    end_ms: float


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's runs; medians over the turns where nothing else is said."""

    policy: str
    output_tokens_per_s: float
    lowest_output_tokens_per_s: float  # of all turns
    highest_output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    seconds: float  # a run
    ttft_p50_ms: float | None  # over the requests of all turns; None: no request got a token
    tpot_p50_ms: float | None  # likewise, of those with more than one token
    turns: int
    tokens_per_iteration: float  # output tokens: the mean batch of decodes
    cpu_decode_share: float  # output tokens whose attention the CPU computed
    double_iteration_share: float  # iterations with two sub-batches
    outside_ms: float  # between two iterations, when nothing is computed: planning, bookkeeping; the mean
    num_preemptions: float
    num_moves: float
    device_busy_share: float  # of the time, over all turns
    cpu_busy_share: float  # with decode attention
    overlap_share: float  # of the time: both at once
    bound_output_tokens_per_s: float | None  # no schedule of this policy can be faster on this machine
    identical_answers: int  # beside those of the first policy
    near_tie_answers: int  # part from them where two tokens were nearly equally probable
    changed_answers: int  # a failure
    errors: dict[str, int]  # requests that were given up: reason -> how many, over all runs
    gpu_peak_bytes: int | None  # None: no GPU
    host_bytes: int  # of the process after the runs

    @property
    def name(self) -> str:
        """As rivals have one."""
        return self.policy

    @property
    def bound_share(self) -> float | None:
        """Share of the bound that was reached."""
        bound = self.bound_output_tokens_per_s
        return None if bound is None else self.output_tokens_per_s / bound

    @property
    def gpu_memory(self) -> str:
        """What it took at most."""
        return "no GPU" if self.gpu_peak_bytes is None else size(self.gpu_peak_bytes)

    @property
    def answers(self) -> str:
        """How they compare."""
        if self.changed_answers:
            return f"{self.changed_answers} CHANGED"
        if self.errors:
            return f"{sum(self.errors.values())} FAILED"
        return f"same ({self.near_tie_answers} near ties)" if self.near_tie_answers else "same"


@dataclass(frozen=True, slots=True)
class Rival:
    """Another program with the same weights and requests; medians over the turns."""

    # Not known of another program.
    ttft_p50_ms: ClassVar[float | None] = None
    tpot_p50_ms: ClassVar[float | None] = None
    bound_output_tokens_per_s: ClassVar[float | None] = None
    bound_share: ClassVar[float | None] = None
    gpu_memory: ClassVar[str | None] = None
    host_bytes: ClassVar[int | None] = None

    name: str
    output_tokens_per_s: float
    lowest_output_tokens_per_s: float  # of all turns
    highest_output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    seconds: float  # a run
    turns: int
    identical_answers: int  # beside those of the first policy
    near_tie_answers: int  # part from them where two tokens were nearly equally probable
    other_answers: int
    settings: str  # how it was run

    @property
    def answers(self) -> str:
        """How they compare."""
        compared = self.identical_answers + self.near_tie_answers + self.other_answers
        return f"{self.identical_answers / compared:.0%} same"


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """All policies on one workload."""

    model: str
    device: str
    dtype: str
    gpu_cache_tokens: int  # 0: none
    cpu_cache_tokens: int
    imitated: bool  # both caches lie in host memory, and the CPU stands in for the GPU
    num_requests: int
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    policies: tuple[PolicyResult, ...]
    rivals: tuple[Rival, ...]
    timeline: tuple[TimelineSpan, ...]  # one iteration, of the policy named in timeline_policy
    timeline_policy: str
    notes: tuple[str, ...]
    suite: Literal["throughput"] = "throughput"

    @property
    def baseline(self) -> PolicyResult | None:
        """The policy that keeps all KV on the device."""
        return next((each for each in self.policies if each.policy == BASELINE), None)

    @property
    def has_failed(self) -> bool:
        """Whether a policy changed an answer or gave one up."""
        return any(each.changed_answers or each.errors for each in self.policies)

    @property
    def fastest(self) -> PolicyResult:
        """The policy with the most output tokens per second."""
        return max(self.policies, key=lambda each: each.output_tokens_per_s)

    @property
    def offloading(self) -> PolicyResult | None:
        """The policy that uses both memories as it is predicted to be fastest."""
        return next((each for each in self.policies if each.policy == "auto"), None)

    @property
    def gain(self) -> float | None:
        """How much faster `auto` is than the baseline; None: one of the two was not measured."""
        if self.offloading is None or self.baseline is None:
            return None
        return self.offloading.output_tokens_per_s / self.baseline.output_tokens_per_s

    @property
    def price(self) -> str:
        """What a gain costs, or saves, in latency: "each chat gets its tokens at 532 ms instead of 82 ms"."""
        new, old = self.offloading, self.baseline
        return "".join(say("price", new=new, old=old)) if new is not None and old is not None else ""

    def metrics(self) -> tuple[Metric, ...]:
        """Output tokens per second of each policy and rival."""
        return tuple(
            Metric(f"throughput.{each.name}.output_tokens_per_s", each.output_tokens_per_s, "output tokens/s")
            for each in self._results
        )

    def section(self) -> Section:
        """A row per policy, bars, one iteration's timeline."""
        title, summary, *notes = say("throughput", report=self, baseline=BASELINE)
        shown = [
            Plot(
                "throughput",
                "Output tokens per second by policy, and what a chat notices of it",
                self._draw_bars,
                (5.4, 1.4 + 0.5 * (len(self.policies) + len(self.rivals))),
            )
        ]
        if self.timeline:
            lanes = len({span.lane for span in self.timeline})
            shown.append(
                Plot(
                    "timeline",
                    f"Who is busy when: layers in the middle of one iteration of {self.timeline_policy}",
                    self._draw_timeline,
                    (5.4, 1.1 + 0.4 * lanes),
                )
            )
        return Section(title, summary, self._tables(), tuple(shown), tuple(notes))

    @property
    def _results(self) -> "tuple[PolicyResult | Rival, ...]":
        return (*self.policies, *self.rivals)

    def _tables(self) -> tuple[Table, Table, Table]:
        """Of rivals less is known than of policies: there is no limit, and nothing of their insides."""
        baseline = self.baseline
        speeds: dict[str, Column] = {
            "policy": "name",
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
            "policy": "name",
            "batch": "tokens_per_iteration:.1f",
            "on CPU": "cpu_decode_share:.0%",
            "two sub-batches": "double_iteration_share:.0%",
            "GPU busy": "device_busy_share:.0%",
            "CPU busy": "cpu_busy_share:.0%",
            "both": "overlap_share:.0%",
            "outside ms": "outside_ms",
            "preempted": "num_preemptions:.0f",
            "moves": "num_moves:.0f",
        }
        runs: dict[str, Column] = {
            "policy": "name",
            "of all turns": lambda each: "-".join(
                map(number, (each.lowest_output_tokens_per_s, each.highest_output_tokens_per_s))
            ),
            "tokens/s": "total_tokens_per_s",
            "seconds": "seconds",
            "GPU memory": "gpu_memory",
            "host memory": "host_bytes:size",
        }
        return (
            Table.of("Speed", self._results, speeds),
            Table.of("What the engine did", self.policies, insides),
            Table.of("Runs and memory", self._results, runs),
        )

    def _draw_bars(self, figure: "Figure") -> None:
        """Speeds, with the spread of the turns and the limits."""
        axes = figure.subplots()
        results = self._results
        names, speeds = zip(*((each.name, each.output_tokens_per_s) for each in results), strict=True)
        paces = ("" if each.tpot_p50_ms is None else f", {number(each.tpot_p50_ms)} ms" for each in results)
        labels = [number(speed) + pace for speed, pace in zip(speeds, paces, strict=True)]
        below = [each.output_tokens_per_s - each.lowest_output_tokens_per_s for each in results]
        above = [each.highest_output_tokens_per_s - each.output_tokens_per_s for each in results]
        drawn = axes.barh(names, speeds, color=BLUE, height=0.6, xerr=(below, above), capsize=3)
        axes.bar_label(drawn, labels, padding=6, fontsize=9, bbox=_UNDER_LABEL)
        bounds = [(at, each.bound_output_tokens_per_s) for at, each in enumerate(self.policies)]
        known = {at: bound for at, bound in bounds if bound is not None}
        if known:
            low, high = [at - 0.38 for at in known], [at + 0.38 for at in known]
            label = "limit: no schedule can be faster"
            axes.vlines(list(known.values()), low, high, color="black", linewidth=2, label=label)
            legend(figure, axes)
        axes.invert_yaxis()
        axes.set_xlabel("output tokens per second, and ms per token of each chat")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.locator_params(axis="x", nbins=5)
        axes.margins(x=0.3)
        tidy(axes, grid=None)

    def _draw_timeline(self, figure: "Figure") -> None:
        """A row per lane, coloured by sub-batch."""
        axes = figure.subplots()
        lanes = [lane for lane in _LANES if any(span.lane == lane for span in self.timeline)]
        for sub_batch, label in ((0, "sub-batch 0"), (1, "sub-batch 1"), (-1, "sampling, copies")):
            spans = [span for span in self.timeline if span.sub_batch == sub_batch]
            if spans:
                axes.barh(
                    [lanes.index(span.lane) for span in spans],
                    [span.end_ms - span.start_ms for span in spans],
                    left=[span.start_ms for span in spans],
                    height=0.7,
                    color=_COLOURS[sub_batch],
                    hatch=_HATCHES[sub_batch],
                    edgecolor="white",
                    linewidth=0.5,
                    label=label,
                )
        axes.set_yticks(
            range(len(lanes)),
            [
                "device" if lane == "device" and self.device != "cuda" else _LANE_NAMES.get(lane, lane)
                for lane in lanes
            ],
        )
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        tidy(axes, grid=None)
        legend(figure, axes, columns=3)
