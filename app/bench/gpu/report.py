"""What the suite found, and how it is told."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from neo_desktop.app.bench.gpu.figures import DecodeFigures, PrefillFigures
from neo_desktop.app.bench.gpu.plot import draw_decode
from neo_desktop.app.bench.gpu_driver import GpuState, state_notes
from neo_desktop.app.bench.section import Metric, Plot, Section, Table
from neo_desktop.app.bench.spread import Spread, number, size


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
        plots: tuple[Plot, ...] = ()
        if self.decode:
            title = f"Tokens per second of {self.model} on the {self._where} and their limit, by batch"
            plots = (Plot("gpu-decode", title, partial(draw_decode, decode=self.decode)),)
        tables = [_decode_table(self.decode)] if self.decode else []
        tables += [_prefill_table(self.prefill), self._memory_table()]
        return Section(
            title=f"Model on the {self._where}",
            summary=self._summary(),
            tables=tuple(tables),
            plots=plots,
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

    def _memory_table(self) -> Table:
        gpu = "not measured: no GPU" if self.peak_gpu_bytes is None else size(self.peak_gpu_bytes)
        rows = (
            ("weights read by an iteration", size(self.weight_bytes)),
            ("GPU memory, at most", gpu),
            ("host memory of the process, at most", size(self.process_bytes)),
            (f"large matrix products in {self.dtype}", f"{self.matrix_gflop_per_s} GFLOP/s"),
        )
        return Table(("memory and arithmetic", "measured"), rows)

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


def _decode_table(decode: tuple[DecodeFigures, ...]) -> Table:
    columns: tuple[str, ...] = (
        "batch",
        "tokens/s",
        "p10-p90",
        "limit",
        "of limit",
        "bound by",
        "step ms",
        "outside ms",
        "idle",
    )
    title = (
        f"Decoding, with contexts of about {decode[0].context_tokens:.0f} tokens" if decode else "Decoding"
    )
    has_energy = any(row.joules_per_token is not None for row in decode)
    rows = []
    for row in decode:
        cells = [
            str(row.batch),
            number(row.tokens_per_s.median),
            row.tokens_per_s.range,
            number(row.limit_tokens_per_s),
            f"{row.share:.0%}",
            row.bound,
            number(row.step_ms.median),
            number(row.outside_ms.median),
            f"{row.idle_share:.0%}",
        ]
        if has_energy:
            joules = row.joules_per_token
            cells.append("not measured" if joules is None else number(joules))
        rows.append(tuple(cells))
    return Table((*columns, "J/token") if has_energy else columns, tuple(rows), title)


def _prefill_table(prefill: PrefillFigures) -> Table:
    row = (
        str(prefill.prompt_tokens),
        str(prefill.tokens_per_s),
        number(prefill.limit_tokens_per_s),
        f"{prefill.share:.0%}",
        prefill.bound,
    )
    columns = ("prompt tokens", "tokens/s", "limit", "of limit", "bound by")
    return Table(columns, (row,), "Prefill of one prompt")
