"""One chat with a model that fits GPU memory only in part, in three ways.

HeteGen's figure 8 on this computer: tokens per second by the share of the weights in GPU memory. Three ways
take turns at the same memory:

    divided      rows of each matrix: GPU, bus and CPU work on each matmul at the same time
    streaming    the first layers are on the GPU; the others cross the bus for each token, ahead of their use
    layer split  the first layers are on the GPU; the CPU computes the others, and one waits for the other

Other programs use the last two (accelerate, if it pinned memory and prefetched; llama.cpp's `-ngl`); here
they run with the same engine and kernels. The report also shows the bound of CPU and bus together.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from benchmarks.checks import above_zero, at_least, each_once
from benchmarks.rig import POLICY, Rig
from benchmarks.shown import model_arguments, progress, show
from benchmarks.weights_on_gpu_report import Sides, Way, WeightsCase, WeightsReport
from neo_desktop.app.bench.section import Spread
from neo_desktop.app.bench.words import no_gpu
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    bound_ms,
    layer_matrices,
    least_gpu_bytes,
    plan_layers,
    plan_weights,
)
from neo_desktop.engine.profiling.budget import MOST_HOST_SHARE
from neo_desktop.engine.profiling.hardware import find_gpus, host_memory
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.shares import UNMEASURED, StreamedShares

_SHARES_SECONDS = 4.0  # for finding the best shares
_TOGETHER: tuple[tuple[Way, ...], ...] = (("divided",), ("streaming", "layer split"))  # with one placement
_ALL_STREAMED = StreamedShares((1,), (1.0,))
_RUN_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE
_LESS_ROOM = "what is free is not enough; close other programs"


@dataclass(frozen=True, slots=True)
class WeightsOptions(EngineOptions):
    """Options of the measurement; the defaults are a thorough run.

    Raises ValueError for invalid values.
    """

    shares: tuple[float, ...] = (0.06, 0.15, 0.3, 0.5, 0.7, 0.9)  # of the layers' weights on the GPU
    prompt_tokens: int = 128
    tokens: int = 32  # timed, per way
    seconds: float = 240.0  # no further share starts after this time
    seed: int = 0  # of the prompts

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        at_least(self, 1, "prompt_tokens", "tokens")
        above_zero(self, "seconds")
        each_once(self, "shares")
        if not all(0 <= share < 1 for share in self.shares):
            raise ValueError(f"shares must be at least 0 and less than 1, got {self.shares}")

    @property
    def kv_tokens(self) -> int:
        """Tokens of the chat and a prompt before it, in whole runs of blocks."""
        longest = self.prompt_tokens + self.tokens + 8
        return 2 * (-(-longest // _RUN_TOKENS)) * _RUN_TOKENS


def run_weights(options: WeightsOptions, progress: Progress) -> Iterator[WeightsReport]:
    """Measure; yield the growing report after each case, or a report without cases if no GPU exists.

    Raises the errors of `Engine.from_pretrained` for a model or a device.
    """
    device = choose_device(options.device)
    if device.type == "cuda":
        yield from measure(options, progress)
    else:
        why = "The CPU was asked for" if options.device == "cpu" else no_gpu(find_gpus()[1])
        yield WeightsReport("", device.type, "", 0, options.prompt_tokens, None, (), (), why)
    progress(1.0, "done")


def measure(options: WeightsOptions, progress: Progress) -> Iterator[WeightsReport]:
    """Measure on the present device; see `run_weights`."""
    return _Measurement(options).run(progress)


class _Measurement:
    """The measurement and its results so far."""

    def __init__(self, options: WeightsOptions) -> None:
        self._options = replace(
            options,
            policy=POLICY,
            cpu_cache_tokens=None,
            cpu_cache_dtype="auto",
            gpu_cache_tokens=options.kv_tokens,
            gpu_weights_gib=None,
            max_batch_requests=1,
        )
        self._cases: list[WeightsCase] = []
        self._notes: list[str] = []
        self._report: WeightsReport | None = None

    def run(self, progress: Progress) -> Iterator[WeightsReport]:
        """Measure share by share until the time is over, one at least."""
        options, started_s = self._options, time.perf_counter()
        # The most informative share comes first.
        shares = sorted(options.shares, key=lambda share: abs(share - 0.5))
        for done, share in enumerate(shares):
            taken_s = time.perf_counter() - started_s
            if done and taken_s * (done + 1) / done > options.seconds:
                left = ", ".join(f"{each:.0%}" for each in sorted(shares[done:]))
                self._notes.append(f"Left out for want of time: {left} of the layers' weights on the GPU.")
                break
            progress(done / len(shares), f"{share:.0%} of the layers' weights on the GPU")
            for ways in _TOGETHER:
                try:
                    self._measure(share, ways)
                except (MemoryError, torch.OutOfMemoryError) as error:
                    said = str(error).partition("\n")[0] or _LESS_ROOM
                    self._notes.append(f"{' and '.join(ways)} with {share:.0%} on the GPU: {said}.")
                return_memory()
                if self._report is not None:
                    yield self._told(self._report)
        if self._report is None:
            raise MemoryError(" ".join(self._notes))
        yield self._told(self._report)

    def _told(self, report: WeightsReport) -> WeightsReport:
        cases = sorted(self._cases, key=lambda case: case.share)
        return replace(report, cases=tuple(cases), notes=tuple(self._notes))

    def _measure(self, share: float, ways: tuple[Way, ...]) -> None:
        placement = _Placement(share, by_layers="divided" not in ways)
        model = load(self._options, plan=placement.plan)
        parts = take_memory(model, self._options)
        decoder = model.decoder
        for way in ways:
            if way == "divided":
                self._measure_shares(parts)
            else:
                shares = _ALL_STREAMED if way == "streaming" else UNMEASURED
                decoder.streamed_shares = decoder.streamed_experts = shares
            prompt_s, steps_s = self._chat(parts)
            tokens_per_s = Spread.of(1 / step_s for step_s in steps_s)
            bound = 1e3 / placement.bound_ms
            self._cases.append(
                WeightsCase(
                    way=way,
                    share=share,
                    gpu_bytes=placement.placed.gpu_bytes,
                    host_bytes=placement.placed.host_bytes,
                    streamed_share=decoder.streamed_shares.of(1),
                    tokens_per_s=tokens_per_s,
                    prompt_tokens_per_s=self._options.prompt_tokens / prompt_s,
                    bound_tokens_per_s=bound,
                    bound_share=tokens_per_s.median / bound,
                )
            )
        self._report = self._report or self._headed(model, placement)

    def _measure_shares(self, parts: EngineParts) -> None:
        decoder, rows = parts.model.decoder, min(parts.limits.max_batch_tokens, self._options.prompt_tokens)
        with closing(IterationTimer(decoder, parts.storage, parts.limits, parts.model.streams)) as timer:
            timer.measure_shares(rows, _SHARES_SECONDS)

    def _chat(self, parts: EngineParts) -> tuple[float, list[float]]:
        """Return the seconds of a prompt, and of the tokens after it."""
        rig = Rig(parts, self._options.prompt_tokens, self._options.seed)
        try:
            rig.prefill()  # compiles its kernels
            prompt_s = sum(each.step_s for each in rig.prefill())
            rig.join(1)
            rig.decode(3)
            return prompt_s, [each.step_s for each in rig.decode(self._options.tokens)]
        finally:
            rig.close()

    def _headed(self, model: LoadedModel, placement: "_Placement") -> WeightsReport:
        rates = placement.rates
        return WeightsReport(
            model=model.name,
            device=model.decoder.device.type,
            dtype=str(model.decoder.dtype).removeprefix("torch."),
            layers_bytes=placement.layers_bytes,
            prompt_tokens=self._options.prompt_tokens,
            sides=Sides(
                rates.cpu_bytes_per_s / 1e9,
                rates.bus_bytes_per_s / 1e9,
                rates.gpu_bytes_per_s / 1e9,
                rates.host_bytes_per_s / 1e9,
            ),
            cases=(),
            notes=(),
        )


class _Placement:
    """Placement of weights within a share of GPU memory, decided while a model is loaded.

    Args:
        share: of the layers' weights that fits.
        by_layers: True: the first layers are on the GPU; else rows of every matrix.
    """

    def __init__(self, share: float, *, by_layers: bool) -> None:
        self._share = share
        self._by_layers = by_layers

    def plan(
        self, config: ModelConfig, form: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> WeightPlan:
        """Return the plan. Raises MemoryError if host memory does not hold the rest."""
        always = least_gpu_bytes(config, form, dtype)
        self.layers_bytes = config.weight_bytes(dtype, form) - always
        gpu_bytes = always + int(self._share * self.layers_bytes)
        self.rates: Rates = measured_rates(device, dtype)
        rows = plan_weights(config, form, dtype, gpu_bytes, self.rates)
        self.placed = plan_layers(config, form, dtype, gpu_bytes) if self._by_layers else rows
        self.bound_ms = bound_ms(layer_matrices(config, form, dtype), rows, self.rates)
        free = int(host_memory().available_bytes * MOST_HOST_SHARE)
        if self.placed.host_bytes > free:
            raise MemoryError(
                f"{self.placed.host_bytes / 1e9:.1f} GB of weights do not fit into the {free / 1e9:.1f} GB "
                "of host memory that may be taken"
            )
        return self.placed


if __name__ == "__main__":
    given = model_arguments(__doc__).parse_args()
    options = WeightsOptions(device=given.device, shape=given.shape, dtype=given.dtype)
    show(run_weights(options, progress), given.json)
