"""Report of device_limit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.rig import Iteration
from neo_desktop.app.bench.section import Column, Section, Spread, Table
from neo_desktop.app.words import binary_size

Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Steady decode iterations of one batch size, from all rounds."""

    batch: int
    context_tokens: float  # mean per request
    tokens_per_s: Spread  # of whole steps, one sample per iteration
    limit_tokens_per_s: float
    share: float  # tokens_per_s.median / limit_tokens_per_s
    bound: Bound  # the longer of the two times
    memory_limit_ms: float  # to read weights and KV
    arithmetic_limit_ms: float  # to compute the linear stages
    read_bytes: int  # weights and KV, on average
    read_gb_per_s: Spread  # plain reads, before and after the iterations
    step_ms: Spread
    outside_ms: Spread  # time of a step outside of the model runner
    idle_share: float  # of the device within iterations


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """A new prompt alone, one per round, including its first token."""

    prompt_tokens: int
    tokens_per_s: Spread
    limit_tokens_per_s: float
    share: float  # of the limit
    bound: Bound


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Results of the suite."""

    model: str
    device: str  # "cuda" or "cpu"
    device_name: str
    dtype: str
    weight_bytes: int  # read by an iteration
    last_level_cache_bytes: int  # of the first core, if the device is a CPU; 0: unknown, or a GPU
    rounds: int  # started
    matrix_gflop_per_s: Spread  # of the device, in the model's dtype
    prefill: PrefillFigures
    decode: tuple[DecodeFigures, ...]  # by rising batch
    peak_gpu_bytes: int | None  # None: the device is the CPU
    process_bytes: int  # peak host memory of the process
    notes: tuple[str, ...]

    def section(self) -> Section:
        memory: dict[str, Column] = {
            "weights read by an iteration": "weight_bytes:size",
            "GPU memory, at most": lambda report: (
                "not measured: no GPU"
                if report.peak_gpu_bytes is None
                else binary_size(report.peak_gpu_bytes)
            ),
            "host memory of the process, at most": "process_bytes:size",
            f"large matrix products in {self.dtype}": "matrix_gflop_per_s: GFLOP/s",
        }
        return Section(
            f"Decodes of {self.model} in {self.dtype} on {self.device_name}",
            "Limit: the time to read weights and KV, or to multiply the weights, whichever is longer, at the "
            "rates of plain reads and of large matrix products. Outside: the part of a step that is not in "
            "the executor.",
            (
                *([_decode_table(self.decode)] if self.decode else []),
                Table.of("Prefill of one prompt", [self.prefill], _PREFILL_COLUMNS),
                Table.of("Memory and arithmetic", [self], memory, missing="not measured"),
            ),
            notes=self.notes,
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
        "tokens/s": "tokens_per_s",
        "limit": "limit_tokens_per_s",
        "of limit": "share:.0%",
        "bound by": "bound",
        "step ms": "step_ms.median",
        "outside ms": "outside_ms.median",
        "idle": "idle_share:.0%",
    }
    return Table.of(
        f"Decoding, with contexts of about {decode[0].context_tokens:.0f} tokens", decode, columns
    )


@dataclass(slots=True)
class Measured:
    """Measurements of one batch size, in all rounds so far."""

    iterations: list[Iteration] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    idle_shares: list[float] = field(default_factory=list)  # one per round


def decode_figures(batch: int, measured: Measured, gflop_per_s: float) -> DecodeFigures:
    """Compare iterations with the limit; `gflop_per_s` is the rate of matmuls."""
    iterations = measured.iterations
    read = Spread.of(measured.read_gb_per_s)
    nbytes = sum(each.work.nbytes for each in iterations) / len(iterations)
    memory_s = nbytes / read.median / 1e9
    arithmetic_s = iterations[0].work.arithmetic_s(gflop_per_s)
    limit = batch / max(memory_s, arithmetic_s)
    rate = Spread.of(batch / each.step_s for each in iterations)
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
    )


def prefill_figures(
    prefills: Sequence[Sequence[Iteration]], read_gb_per_s: float, gflop_per_s: float
) -> PrefillFigures:
    """Compare prompts with the limit.

    Args:
        prefills: iterations per prompt; all prompts are equally long.
        read_gb_per_s: rate of plain reads.
        gflop_per_s: rate of matmuls.
    """
    work = [each.work for each in prefills[0]]
    memory_s = [each.memory_s(read_gb_per_s) for each in work]
    arithmetic_s = [each.arithmetic_s(gflop_per_s) for each in work]
    tokens = sum(each.new_tokens for each in prefills[0])
    rate = Spread.of(tokens / sum(each.step_s for each in prefill) for prefill in prefills)
    limit = tokens / sum(map(max, memory_s, arithmetic_s))  # each chunk has its own limit
    return PrefillFigures(
        prompt_tokens=tokens,
        tokens_per_s=rate,
        limit_tokens_per_s=limit,
        share=rate.median / limit,
        bound=_bound(sum(memory_s), sum(arithmetic_s)),
    )


def _bound(memory_s: float, arithmetic_s: float) -> Bound:
    return "memory" if memory_s >= arithmetic_s else "arithmetic"
