"""The same weights and requests through llama.cpp, after the policies' turns.

It gets what ours had: the number format for weights and KV, the threads, room for as many tokens of KV. Our
model and caches are gone by then, so that a GPU has room for its own.
"""

import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from neo_desktop.app.bench.suite import Progress
from neo_desktop.app.bench.throughput.answers import TOLERANCES, TOP_LOGPROBS, Answer, Comparison, compare
from neo_desktop.app.bench.throughput.llama_cpp.batching import serve
from neo_desktop.app.bench.throughput.llama_cpp.gguf_file import check_expressible, write_gguf
from neo_desktop.app.bench.throughput.llama_cpp.library import (
    Context,
    ContextOptions,
    load_libraries,
)
from neo_desktop.app.bench.throughput.options import ThroughputOptions
from neo_desktop.app.bench.throughput.report import Rival
from neo_desktop.app.bench.throughput.workload import Workload
from neo_desktop.engine.placement import Place
from neo_desktop.engine.profiling.budget import BLOCK_SIZE
from neo_desktop.engine.setup import Setup
from neo_desktop.models.config import ModelConfig

_ROUNDING = 256  # llama.cpp's: tokens of KV of a sequence are a multiple of it
_FILE_SLACK = 1.01  # metadata, padding, norms in 32 bits


@dataclass(frozen=True, slots=True)
class _Job:
    """What llama.cpp has to do."""

    workload: Workload
    answers: tuple[Answer, ...]  # ours to the prompts of turn 0
    vocab_size: int
    on_gpu: bool  # where ours was
    kv_tokens: int  # of our cache
    dtype: torch.dtype


class LlamaCppBaseline:
    """Takes the model from the policies as a temporary file, which `close` removes.

    Raises ValueError where a library is missing.
    """

    def __init__(self) -> None:
        self._libraries = load_libraries()
        self._folder = tempfile.TemporaryDirectory(prefix="neo-desktop-")
        self._file = Path(self._folder.name) / "model.gguf"
        self._job: _Job | None = None

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()

    def check(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Refuse at once what would fail after minutes.

        Raises:
            ValueError: the model is not one for llama.cpp.
            OSError: the disk has too little room.
        """
        check_expressible(config)
        needed, free = _FILE_SLACK * config.weight_bytes(dtype), shutil.disk_usage(self._folder.name).free
        if needed > free:
            raise OSError(
                f"--baseline llama.cpp writes the weights to a temporary file of {needed / 1e9:.1f} GB, but "
                f"{self._folder.name} has {free / 1e9:.1f} GB free: name a folder with more room in TMPDIR"
            )

    def take(self, setup: Setup, workload: Workload, answers: tuple[Answer, ...]) -> None:
        """Write the model while it is there, and remember what to do.

        Args:
            answers: to the prompts of turn 0.
        """
        decoder = setup.model.decoder
        write_gguf(self._libraries.gguf, decoder, self._file)
        on_gpu = decoder.device.type == "cuda"
        num_blocks = setup.num_blocks.get(Place.DEVICE, 0) if on_gpu else 0
        num_blocks = num_blocks or sum(setup.num_blocks.values())
        self._job = _Job(
            workload, answers, decoder.config.vocab_size, on_gpu, num_blocks * BLOCK_SIZE, decoder.dtype
        )

    def turns(self, options: ThroughputOptions, progress: Progress) -> Iterator[Rival]:
        """Answer the prompts of turn 0 to compare and to warm up, then those of each turn; yield after each.

        Raises:
            RuntimeError: llama.cpp failed.
        """
        job, library = self._job, self._libraries.llama_cpp
        assert job is not None, "`take` comes first"
        gc.collect()
        torch.cuda.empty_cache()  # of ours; without a GPU this does nothing
        progress(0.0, "llama.cpp: loading the model")
        asked = _context_options(job, library)
        context = Context(library, self._file, asked)
        try:
            counts = [request.output_tokens for request in job.workload.requests]
            runs: list[float] = []  # seconds
            comparison = Comparison(0, 0, 0)
            for turn in range(options.repeats + 1):
                prompts = job.workload.prompts(options.seed, turn, job.vocab_size)
                num_logprobs = 0 if turn else TOP_LOGPROBS
                answers, seconds = serve(
                    context, prompts, counts, _step(progress, turn, options.repeats + 1), num_logprobs
                )
                if turn == 0:
                    comparison = compare(answers, job.answers, TOLERANCES[job.dtype])
                    continue
                runs.append(seconds)
                yield _rival(job, runs, comparison, self._settings(context, asked))
        finally:
            context.close()

    def _settings(self, context: Context, asked: ContextOptions) -> str:
        library = self._libraries.llama_cpp
        where = "on the GPU" if asked.on_gpu else f"on the CPU with {asked.num_threads} threads"
        if self._job is not None and self._job.on_gpu and not asked.on_gpu:
            where += " (it was built without GPU support)"
        dtype = str(asked.dtype).removeprefix("torch.")
        return (
            f"llama.cpp, through llama-cpp-python {library.__version__}, ran {where}: weights and KV in "
            f"{dtype}, {context.num_sequences} sequences of up to {asked.tokens_per_sequence} tokens at the "
            f"same time, prompts beside decodes in batches of up to {context.batch_tokens} tokens, all "
            "else as it is by default. It ran after all policies."
        )


def _step(progress: Progress, turn: int, num_turns: int) -> Callable[[float], None]:
    return lambda share: progress((turn + share) / num_turns, "llama.cpp")


def _context_options(job: _Job, library: Any) -> ContextOptions:
    """As many sequences at the same time as our cache would hold, each as long as the longest."""
    on_gpu = job.on_gpu and bool(library.llama_supports_gpu_offload())
    longest = max(request.total_tokens for request in job.workload.requests)
    per_sequence = ceil(longest / _ROUNDING) * _ROUNDING
    return ContextOptions(
        dtype=job.dtype,
        num_sequences=max(
            1,
            min(
                job.kv_tokens // per_sequence,
                len(job.workload.requests),
                library.llama_max_parallel_sequences(),
            ),
        ),
        tokens_per_sequence=per_sequence,
        num_threads=torch.get_num_threads(),
        on_gpu=on_gpu,
    )


def _rival(job: _Job, runs: Sequence[float], comparison: Comparison, settings: str) -> Rival:
    requests = job.workload.requests
    outputs = sum(request.output_tokens for request in requests)
    total = sum(request.total_tokens for request in requests)
    seconds = statistics.median(runs)
    return Rival(
        name="llama.cpp",
        output_tokens_per_s=outputs / seconds,
        lowest_output_tokens_per_s=outputs / max(runs),
        highest_output_tokens_per_s=outputs / min(runs),
        total_tokens_per_s=total / seconds,
        seconds=seconds,
        turns=len(runs),
        identical_answers=comparison.identical,
        near_tie_answers=comparison.near_ties,
        other_answers=comparison.changed,
        settings=settings,
    )
