"""What the suite found, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLACK, BLUE, doubling, round_logs, spreads, tidy
from neo_desktop.app.bench.computer import GpuState
from neo_desktop.app.bench.gpu.rig import Iteration
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Spread, Table, size
from neo_desktop.app.bench.words import say

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
        title, summary, *notes = say("gpu", report=self)
        where = "GPU" if self.device == "cuda" else "CPU"
        plot = f"Tokens per second of {self.model} on the {where} and their limit, by batch"
        memory: dict[str, Column] = {
            "weights read by an iteration": "weight_bytes:size",
            "GPU memory, at most": lambda report: (
                "not measured: no GPU" if report.peak_gpu_bytes is None else size(report.peak_gpu_bytes)
            ),
            "host memory of the process, at most": "process_bytes:size",
            f"large matrix products in {self.dtype}": "matrix_gflop_per_s: GFLOP/s",
        }
        return Section(
            title,
            summary,
            tables=(
                *([_decode_table(self.decode)] if self.decode else []),
                Table.of("Prefill of one prompt", [self.prefill], _PREFILL_COLUMNS),
                Table.listing("", ("memory and arithmetic", "measured"), self, memory),
            ),
            plots=(Plot("gpu-decode", plot, self._draw),) if self.decode else (),
            notes=(*notes, *self.notes),
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
        columns["J/token"] = lambda row: (
            "not measured" if row.joules_per_token is None else row.joules_per_token
        )
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
