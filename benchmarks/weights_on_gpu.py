"""One chat with a model that fits GPU memory only in part, in three ways.

    python -m benchmarks.weights_on_gpu --shape llama-2-13b

HeteGen's figure 8 on this computer: tokens per second by the share of the weights in GPU memory. Three ways
have the same memory:

    divided      rows of all matrices: GPU, bus and CPU work on each matmul at the same time
    streaming    the first layers are on the GPU; the others cross the bus for each token, ahead of their use
    layer split  the first layers are on the GPU; the CPU computes the others, and one waits for the other

Other programs use the last two (accelerate, if it pinned memory and prefetched; llama.cpp's `-ngl`); here
they run with the same engine and kernels. Bound: CPU and bus together, each measured alone with one row.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median

import torch

from benchmarks.rig import POLICY, Rig
from benchmarks.shown import model_arguments
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    bound_ms,
    layer_matrices,
    least_gpu_bytes,
    plan_weights,
)
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.setup import take_memory
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.shares import UNMEASURED, StreamedShares
from research.layer_plan import plan_layers

WAYS = ("divided", "streaming", "layer split")
SHARES = (0.06, 0.15, 0.3, 0.5, 0.7, 0.9)  # of the layers' weights on the GPU
SHARES_SECONDS = 4.0  # for finding the best shares
ALL_STREAMED = StreamedShares((1,), (1.0,))


@dataclass(frozen=True, slots=True)
class WeightsCase:
    """One way at one share of GPU memory."""

    way: str
    share: float  # of the layers' weights that fits GPU memory
    tokens_per_s: float  # one chat
    prompt_tokens_per_s: float
    bound_share: float  # of what CPU and bus allow

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of the layers on the GPU, {self.way}: {self.tokens_per_s:.1f} tokens/s "
            f"({self.bound_share:.0%} of the bound), prompts {self.prompt_tokens_per_s:.0f} tokens/s"
        )


def measure(
    options: EngineOptions, shares: Sequence[float] = SHARES, prompt_tokens: int = 128, tokens: int = 32
) -> Iterator[WeightsCase]:
    """Yield a case per share and way, if its memory suffices."""
    run = BLOCK_SIZE * BLOCKS_PER_RUN
    kv_tokens = 2 * -(-(prompt_tokens + tokens + 8) // run) * run
    options = replace(options, policy=POLICY, gpu_cache_tokens=kv_tokens, max_batch_requests=1)
    for share in shares:
        for way in WAYS:
            try:
                yield _case(options, share, way, prompt_tokens, tokens)
            except (MemoryError, torch.OutOfMemoryError) as error:
                print(f"{share:.0%}, {way}: {error}")
            return_memory()


def _case(options: EngineOptions, share: float, way: str, prompt_tokens: int, tokens: int) -> WeightsCase:
    bound = [0.0]

    def plan(config: ModelConfig, form: WeightFormat, dtype: torch.dtype, device: torch.device) -> WeightPlan:
        always, rates = least_gpu_bytes(config, form, dtype), measured_rates(device, dtype)
        gpu_bytes = always + int(share * (config.weight_bytes(dtype, form) - always))
        rows = plan_weights(config, form, dtype, gpu_bytes, rates)
        bound[0] = bound_ms(layer_matrices(config, form, dtype), rows, rates)
        return rows if way == "divided" else plan_layers(config, form, dtype, gpu_bytes)

    parts = take_memory(load(options, plan=plan), options)
    decoder = parts.model.decoder
    if way == "divided":
        most_rows = min(parts.limits.max_batch_tokens, prompt_tokens)
        with closing(IterationTimer(decoder, parts.storage, parts.limits, parts.model.streams)) as timer:
            timer.measure_shares(most_rows, SHARES_SECONDS)
    else:
        decoder.streamed_shares = ALL_STREAMED if way == "streaming" else UNMEASURED
        decoder.streamed_experts = decoder.streamed_shares
    with closing(Rig(parts, prompt_tokens)) as rig:
        rig.prefill()  # compiles its kernels
        prompt_s = sum(step.seconds for step in rig.prefill())
        rate = 1 / median(step.seconds for step in rig.decode(1, tokens))
    return WeightsCase(way, share, rate, prompt_tokens / prompt_s, rate * bound[0] / 1e3)


def main() -> None:
    given = model_arguments(__doc__).parse_args()
    for case in measure(EngineOptions(device=given.device, shape=given.shape, dtype=given.dtype)):
        print(case, flush=True)


if __name__ == "__main__":
    main()
