"""Decoding on one device, compared with that device's limit.

    python -m benchmarks.device_limit --shape llama-3.2-1b

An iteration of decodes reads all weights once and its requests' KV, and multiplies every weight once
per request. Reading limits small batches, arithmetic large ones. The limit is the longer of the two times, at
the rates of plain reads and of large matmuls. Outside: the part of a step that is not in the model runner.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median

import torch

from benchmarks.rig import POLICY, Rig, Step
from benchmarks.shown import model_arguments
from neo_desktop import native
from neo_desktop.app.bench.device_rates import CudaTimer, matrix_rate, read_rate
from neo_desktop.app.bench.host_rates import Host
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.setup import set_up
from neo_desktop.models.config import ModelConfig

MOST_BYTES = 1 << 30  # beyond any cache; more would only take longer
MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class Limit:
    """Rates of the device that runs the model."""

    read_gb_per_s: Callable[[], float]
    gflop_per_s: float

    @classmethod
    def of(cls, streams: Streams, dtype: torch.dtype) -> "Limit":
        name, size = str(dtype).removeprefix("torch."), MATRIX_SIZE[streams.device.type]
        if streams.device.type == "cuda":
            timer = CudaTimer(streams, MOST_BYTES, size)
            read = read_rate(timer, timer.memory_bytes)
            return cls(read.giga_per_s, matrix_rate(timer, size, name).giga_per_s())
        host = Host(MOST_BYTES)
        host.matrix_gflop_per_s(size, name)  # warm up
        threads = native.default_num_threads()
        return cls(lambda: host.read_gb_per_s(threads), host.matrix_gflop_per_s(size, name))

    def seconds(self, config: ModelConfig, dtype: torch.dtype, step: Step) -> float:
        """Return the least time of a step."""
        head = config.vocab_size * config.hidden_size
        layers = config.num_parameters - (head if config.tie_word_embeddings else 2 * head)
        sequences = list(step.plan.sequences)
        sampled = sum(sequence.sampling is not None for sequence in sequences)
        windows, lens = config.layer_windows, step.context_lens
        kv_tokens = sum(min(length, window or length) for length in lens for window in windows)
        kv_bytes = kv_tokens * config.kv_bytes_per_token(dtype) // config.num_layers
        read = (layers + (head if sampled else 0)) * dtype.itemsize + kv_bytes
        tokens = sum(len(sequence.token_ids) for sequence in sequences)
        arithmetic_s = 2 * (layers * tokens + head * sampled) / self.gflop_per_s / 1e9
        return max(read / self.read_gb_per_s() / 1e9, arithmetic_s)


@dataclass(frozen=True, slots=True)
class Row:
    """Steps of one batch; batch 0 is a prompt alone."""

    batch: int
    tokens_per_s: float
    share: float  # of the limit
    step_ms: float
    outside_ms: float

    def __str__(self) -> str:
        what = f"batch {self.batch}" if self.batch else "a prompt"
        return (
            f"{what}: {self.tokens_per_s:.1f} tokens/s, {self.share:.0%} of the limit, "
            f"step {self.step_ms:.2f} ms, outside {self.outside_ms:.2f} ms"
        )


def measure(
    options: EngineOptions, batches: Sequence[int], context_tokens: int, count: int = 16
) -> Iterator[Row]:
    """Measure a prompt alone, then `count` steps per batch.

    Raises:
        MemoryError: the KV of a batch does not fit.
    """
    run = BLOCK_SIZE * BLOCKS_PER_RUN
    longest = -(-(context_tokens + (count + 2) * len(batches)) // run) * run
    options = replace(
        options, policy=POLICY, gpu_cache_tokens=(max(batches) + 1) * longest, max_batch_requests=max(batches)
    )
    parts = set_up(options)
    config, dtype = parts.model.config, parts.model.decoder.dtype
    with parts.model.streams.on_device():
        limit = Limit.of(parts.model.streams, dtype)
    with closing(Rig(parts, context_tokens)) as rig:
        rig.prefill()  # compiles its kernels
        for batch in (0, *batches):
            steps = rig.decode(batch, count) if batch else rig.prefill()
            least_s = [limit.seconds(config, dtype, step) for step in steps]
            seconds = median(step.seconds for step in steps) if batch else sum(s.seconds for s in steps)
            yield Row(
                batch,
                (batch or context_tokens) / seconds,
                (median(least_s) if batch else sum(least_s)) / seconds,
                seconds * 1e3,
                median(step.seconds - step.model_s for step in steps) * 1e3,
            )


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=512)
    given: argparse.Namespace = parser.parse_args()
    options = EngineOptions(device=given.device, shape=given.shape, dtype=given.dtype)
    for row in measure(options, given.batches, given.context):
        print(row, flush=True)


if __name__ == "__main__":
    main()
