"""The same weights and requests through llama.cpp, after the policies' turns.

It gets what ours had: the number format for weights and KV, the threads, room for as many tokens of KV. Our
model and caches are gone by then, so that a GPU has room for its own.
"""

import gc
import importlib
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from neo_desktop.app.bench.section import Progress
from neo_desktop.app.bench.throughput.answers import TOLERANCES, Answer, Comparison, compare
from neo_desktop.app.bench.throughput.llama_cpp.gguf_file import check_expressible, write_gguf
from neo_desktop.app.bench.throughput.llama_cpp.worker import (
    COMMAND,
    Failed,
    Job,
    Message,
    Share,
    Started,
)
from neo_desktop.app.bench.throughput.options import ThroughputOptions
from neo_desktop.app.bench.throughput.report import Rival
from neo_desktop.app.bench.throughput.workload import Workload
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.placement import Place
from neo_desktop.engine.setup import Setup
from neo_desktop.models.config import ModelConfig

_FILE_SLACK = 1.01  # metadata, padding, norms in 32 bits
_TOLERANCE = TOLERANCES[torch.float16]  # on the CPU, its flash attention rounds to 16 bits, whatever KV has
_LINES_TOLD = 3  # of what llama.cpp printed last, if it ends without a word


class LlamaCppBaseline:
    """Takes the model from the policies as a temporary file, which `close` removes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="neo-desktop-")
        self._workload = Workload((), 0)
        self._answers: tuple[Answer, ...] = ()
        self._job: Job | None = None

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

    def take(
        self, setup: Setup, workload: Workload, answers: tuple[Answer, ...], options: ThroughputOptions
    ) -> None:
        """Write the model while it is there, and remember what to do.

        Args:
            answers: ours to the prompts of turn 0.
        """
        decoder = setup.model.decoder
        file = Path(self._folder.name) / "model.gguf"
        write_gguf(importlib.import_module("gguf"), decoder, file)
        on_gpu = decoder.device.type == "cuda"
        num_blocks = setup.num_blocks.get(Place.DEVICE, 0) if on_gpu else 0
        vocab_size = decoder.config.vocab_size
        self._workload, self._answers = workload, answers
        self._job = Job(
            file=file,
            dtype=decoder.dtype,
            wants_gpu=on_gpu,
            kv_tokens=(num_blocks or sum(setup.num_blocks.values())) * BLOCK_SIZE,
            num_threads=torch.get_num_threads(),
            prompts=tuple(
                workload.prompts(options.seed, turn, vocab_size) for turn in range(options.repeats + 1)
            ),
            num_outputs=tuple(request.output_tokens for request in workload.requests),
            longest=max(request.total_tokens for request in workload.requests),
        )

    def turns(self, progress: Progress) -> Iterator[Rival]:
        """Answer the prompts of turn 0 to compare and to warm up, then those of each turn; yield after each.

        Raises:
            RuntimeError: llama.cpp failed.
        """
        job = self._job
        assert job is not None, "`take` comes first"
        gc.collect()
        torch.cuda.empty_cache()  # of ours; without a GPU this does nothing
        progress(0.0, "llama.cpp: loading the model")
        started: Started | None = None
        comparison: Comparison | None = None
        runs: list[float] = []  # seconds
        for message in self._run(job):
            match message:
                case Started():
                    started = message
                case Share(share):
                    progress(share, f"llama.cpp: {len(job.num_outputs)} requests")
                case Failed(reason):
                    raise RuntimeError(reason)
                case turn if comparison is None:
                    comparison = compare(turn.answers, self._answers, max(TOLERANCES[job.dtype], _TOLERANCE))
                case turn:
                    assert started is not None
                    runs.append(turn.seconds)
                    yield _rival(self._workload, runs, comparison, _settings(job, started))

    def _run(self, job: Job) -> Iterator[Message]:
        """Run the job in a process of its own, and return its messages as they come."""
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        printed = Path(self._folder.name) / "printed"
        with printed.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            try:
                pickle.dump(job, stdin)
                stdin.flush()
                while True:
                    yield pickle.load(stdout)
            except (EOFError, BrokenPipeError):
                if process.wait() != 0:
                    yield Failed(_death(process.returncode, printed))
            finally:
                process.kill()
                process.wait()


def _death(code: int, printed: Path) -> str:
    lines = printed.read_text(errors="replace").strip().splitlines()[-_LINES_TOLD:]
    return f"llama.cpp's process ended with code {code}: {'; '.join(lines) or 'it printed nothing'}"


def _settings(job: Job, started: Started) -> str:
    options = started.options
    where = "on the GPU" if options.on_gpu else f"on the CPU with {options.num_threads} threads"
    if job.wants_gpu and not options.on_gpu:
        where += " (it was built without GPU support)"
    dtype = str(job.dtype).removeprefix("torch.")
    return (
        f"llama.cpp, through llama-cpp-python {started.version}, ran {where}: weights and KV in {dtype}, "
        f"{started.num_sequences} sequences of up to {options.tokens_per_sequence} tokens at the same time, "
        f"prompts beside decodes in batches of up to {started.batch_tokens} tokens, all else as it is by "
        "default. It ran after all policies."
    )


def _rival(workload: Workload, runs: Sequence[float], comparison: Comparison, settings: str) -> Rival:
    outputs = sum(request.output_tokens for request in workload.requests)
    total = sum(request.total_tokens for request in workload.requests)
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
