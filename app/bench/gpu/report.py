"""What the suite found, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLACK, BLUE, doubling, round_logs, spreads, tidy
from neo_desktop.app.bench.gpu.rig import Iteration
from neo_desktop.app.bench.gpu_driver import GpuState, state_notes
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Spread, Table, number, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Steady decode iterations of one batch, from all rounds."""

    batch: int
    context_tokens: float  # of a request, on average
    tokens_per_s: Spread  # of whole steps, one sample per iteration
    limit_tokens_per_s: float
    share: float  # of the limit: tokens_per_s.median / limit_tokens_per_s
    bound: Bound  # which of the two times is the longer one
    memory_limit_ms: float  # to read weights and KV
    arithmetic_limit_ms: float  # to compute the linear stages
    read_bytes: int  # weights and KV, on average
    read_gb_per_s: Spread  # of plain reads, before and after the iterations
    step_ms: Spread
    outside_ms: Spread  # of a step, not in the executor: between two iterations
    idle_share: float  # of the device within iterations
    joules_per_token: float | None  # of the GPU; None: not measured


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """A new prompt alone, one per round; its first token is part of it."""

    prompt_tokens: int
    tokens_per_s: Spread
    limit_tokens_per_s: float
    share: float  # of the limit
    bound: Bound


@dataclass(frozen=True, slots=True)
class GpuReport:
    """How near decoding comes to what the device allows."""

    model: str
    device: str  # "cuda" or "cpu"
    device_name: str
    dtype: str
    weight_bytes: int  # that an iteration reads
    last_level_cache_bytes: int  # of the first core, where the device is the CPU; 0: unknown, or a GPU
    rounds: int  # begun
    matrix_gflop_per_s: Spread  # of the device, in the model's dtype
    prefill: PrefillFigures
    decode: tuple[DecodeFigures, ...]  # by rising batch
    peak_gpu_bytes: int | None  # None: the device is the CPU
    process_bytes: int  # host memory that the process had at most while this was measured
    state: GpuState | None  # of the GPU before the run; None: not known
    notes: tuple[str, ...]
    suite: Literal["gpu"] = "gpu"

    def section(self) -> Section:
        """What is shown everywhere."""
        plot = f"Tokens per second of {self.model} on the {self._where} and their limit, by batch"
        gpu = "not measured: no GPU" if self.peak_gpu_bytes is None else size(self.peak_gpu_bytes)
        memory = (
            ("weights read by an iteration", size(self.weight_bytes)),
            ("GPU memory, at most", gpu),
            ("host memory of the process, at most", size(self.process_bytes)),
            (f"large matrix products in {self.dtype}", f"{self.matrix_gflop_per_s} GFLOP/s"),
        )
        return Section(
            title=f"Model on the {self._where}",
            summary=self._summary(),
            tables=(
                *([_decode_table(self.decode)] if self.decode else []),
                Table.of("Prefill of one prompt", [self.prefill], _PREFILL_COLUMNS),
                Table(("memory and arithmetic", "measured"), memory),
            ),
            plots=(Plot("gpu-decode", plot, self._draw),) if self.decode else (),
            notes=self._notes(),
        )

    def metrics(self) -> tuple[Metric, ...]:
        """The figures to compare with another run."""
        found = []
        for row in self.decode:
            name = f"gpu.{self.device}.batch_{row.batch}"
            found += [
                Metric(f"{name}.decode_tokens_per_s", row.tokens_per_s.median, "tokens/s"),
                Metric(f"{name}.share_of_limit", row.share, ""),
                Metric(f"{name}.outside_ms", row.outside_ms.median, "ms", False),
            ]
        rate = self.prefill.tokens_per_s.median
        return (*found, Metric(f"gpu.{self.device}.prefill_tokens_per_s", rate, "tokens/s"))

    @property
    def _where(self) -> str:
        return "GPU" if self.device == "cuda" else "CPU"

    def _summary(self) -> str:
        where = f"{self.model} in {self.dtype} on the {self._where} ({self.device_name})"
        if self.device == "cpu":
            where = f"The CPU was measured as the model's device, not a GPU. {where}"
        if not self.decode:
            return f"{where}: nothing was decoded yet."
        first, last = self.decode[0], self.decode[-1]
        text = f"{where} decodes {_told(first)}"
        if last.batch != first.batch:
            text += f" and {_told(last)}"
        return f"{text}."

    def _draw(self, figure: "Figure") -> None:
        """Tokens per second and their limit against the batch; bars from the 10th to the 90th percentile."""
        axes = figure.subplots()
        batches = [row.batch for row in self.decode]
        axes.plot(batches, [row.limit_tokens_per_s for row in self.decode], "s--", color=BLACK, label="limit")
        label = "decoded, and its share of the limit"
        spreads(axes, batches, [row.tokens_per_s for row in self.decode], "o-", BLUE, label)
        below = {"textcoords": "offset points", "xytext": (0, -15), "ha": "center", "fontsize": 9}
        for row in self.decode:
            axes.annotate(f"{row.share:.0%}", (row.batch, row.tokens_per_s.p10), **below)  # type: ignore[arg-type]
        axes.set_yscale("log")
        axes.margins(0.08, 0.15)
        doubling(axes, batches)
        round_logs(axes.yaxis)
        axes.set(xlabel="requests that decode together", ylabel="tokens per second")
        tidy(axes)
        axes.legend(frameon=False)

    def _notes(self) -> tuple[str, ...]:
        notes = [
            "Limit: the longer of two times. Memory: weights once and KV of all requests, at the rate of "
            "plain reads of as many bytes (1 GiB at most), measured before and after the iterations. "
            "Arithmetic: two operations per weight and token, at the rate of large matrix products; those "
            "of attention are not counted.",
            "Tokens per second are those of whole steps: medians over iterations, and their 10th and 90th "
            "percentiles. Outside the model: scheduling, text and bookkeeping; the sampler counts as "
            "model. Idle: share of the iteration without work on the device, in iterations of their own with "
            "a timeline; gaps between the kernels of a stage count as work.",
        ]
        if 0 < self.weight_bytes < self.last_level_cache_bytes:
            notes.append(
                f"The weights ({size(self.weight_bytes)}) fit into the last-level cache "
                f"({size(self.last_level_cache_bytes)}): the limit is that of the cache. A larger model "
                "shows the memory's."
            )
        beyond = [str(row.batch) for row in self.decode if row.share > 1]
        if beyond:
            notes.append(
                f"More than the limit at batch {', '.join(beyond)}: part of what is read stayed in a cache "
                "nearer to the cores, or the device was faster than while the limit was measured."
            )
        if self.device == "cuda":
            notes += state_notes(self.state)
            if any(row.joules_per_token is not None for row in self.decode):
                notes.append("Energy: the GPU's own counter over all decode iterations of a batch.")
            else:
                notes.append("Energy was not measured: the driver has no counter of it.")
        return (*notes, *self.notes)


def _told(row: DecodeFigures) -> str:
    requests = "1 request" if row.batch == 1 else f"{row.batch} requests"
    return (
        f"{number(row.tokens_per_s.median)} tokens/s with {requests}, {row.share:.0%} of what its "
        f"{row.bound} allows"
    )


_PREFILL_COLUMNS: dict[str, Column] = {
    "prompt tokens": "prompt_tokens",
    "tokens/s": "tokens_per_s",
    "limit": "limit_tokens_per_s",
    "of limit": "share:.0%",
    "bound by": "bound",
}


def _decode_table(decode: tuple[DecodeFigures, ...]) -> Table:
    columns: dict[str, Column] = {
        "batch": "batch",
        "tokens/s": "tokens_per_s.median",
        "p10-p90": "tokens_per_s.range",
        "limit": "limit_tokens_per_s",
        "of limit": "share:.0%",
        "bound by": "bound",
        "step ms": "step_ms.median",
        "outside ms": "outside_ms.median",
        "idle": "idle_share:.0%",
    }
    if any(row.joules_per_token is not None for row in decode):
        columns["J/token"] = lambda row: _measured(row.joules_per_token)
    return Table.of(
        f"Decoding, with contexts of about {decode[0].context_tokens:.0f} tokens", decode, columns
    )


@dataclass(slots=True)
class Measured:
    """Of one batch, in all rounds so far."""

    iterations: list[Iteration] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    idle_shares: list[float] = field(default_factory=list)  # one per round
    joules: list[float] = field(default_factory=list)  # one per round, or none


def decode_figures(batch: int, measured: Measured, gflop_per_s: float) -> DecodeFigures:
    """Set iterations beside the limit; `gflop_per_s` is the rate of matrix products."""
    iterations = measured.iterations
    read = Spread.of(measured.read_gb_per_s)
    nbytes = sum(each.work.nbytes for each in iterations) / len(iterations)
    memory_s = nbytes / read.median / 1e9
    arithmetic_s = iterations[0].work.arithmetic_s(gflop_per_s)
    limit = batch / max(memory_s, arithmetic_s)
    rate = Spread.of(batch / each.step_s for each in iterations)
    has_energy = len(measured.joules) == len(measured.idle_shares)
    return DecodeFigures(
        batch=batch,
        context_tokens=sum(each.context_tokens for each in iterations) / len(iterations) / batch,
        tokens_per_s=rate,
        limit_tokens_per_s=limit,
        share=rate.median / limit,
        bound=_bound(memory_s, arithmetic_s),
        memory_limit_ms=memory_s * 1e3,
        arithmetic_limit_ms=arithmetic_s * 1e3,
        read_bytes=round(nbytes),
        read_gb_per_s=read,
        step_ms=Spread.of(each.step_s * 1e3 for each in iterations),
        outside_ms=Spread.of((each.step_s - each.model_s) * 1e3 for each in iterations),
        idle_share=Spread.of(measured.idle_shares).median,
        joules_per_token=sum(measured.joules) / (batch * len(iterations)) if has_energy else None,
    )


def prefill_figures(
    prefills: Sequence[Sequence[Iteration]], read_gb_per_s: float, gflop_per_s: float
) -> PrefillFigures:
    """Set prompts beside the limit.

    Args:
        prefills: the iterations of each prompt; all prompts are equally long.
        read_gb_per_s: rate of plain reads.
        gflop_per_s: rate of matrix products.
    """
    work = [each.work for each in prefills[0]]
    memory_s = [each.memory_s(read_gb_per_s) for each in work]
    arithmetic_s = [each.arithmetic_s(gflop_per_s) for each in work]
    tokens = sum(each.new_tokens for each in prefills[0])
    rate = Spread.of(tokens / sum(each.step_s for each in prefill) for prefill in prefills)
    limit = tokens / sum(map(max, memory_s, arithmetic_s))  # each chunk has a limit of its own
    return PrefillFigures(
        prompt_tokens=tokens,
        tokens_per_s=rate,
        limit_tokens_per_s=limit,
        share=rate.median / limit,
        bound=_bound(sum(memory_s), sum(arithmetic_s)),
    )


def _bound(memory_s: float, arithmetic_s: float) -> Bound:
    return "memory" if memory_s >= arithmetic_s else "arithmetic"


def _measured(value: float | None) -> object:
    return "not measured" if value is None else value
