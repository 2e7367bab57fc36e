"""The process in which llama.cpp runs.

A process of its own, because OpenMP reads only once how threads shall wait, and neo-desktop wants that
otherwise than llama.cpp; and because llama.cpp ends its process where a GPU has no memory left.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from neo_desktop.app.bench.throughput.answers import TOP_LOGPROBS, Answer
from neo_desktop.app.bench.throughput.llama_cpp.batching import serve
from neo_desktop.app.bench.throughput.llama_cpp.library import Context, ContextOptions, load_library

# llama.cpp comes first: with it OpenMP is loaded, before neo-desktop's setting is there.
COMMAND = "import llama_cpp, neo_desktop.app.bench.throughput.llama_cpp.worker as worker; worker.main()"
_ROUNDING = 256  # llama.cpp's: tokens of KV of a sequence are a multiple of it
_SHOWN_SHARE = 0.01  # progress in smaller steps is not told


@dataclass(frozen=True, slots=True)
class Job:
    """What llama.cpp has to do."""

    file: Path
    dtype: torch.dtype  # of weights and KV
    wants_gpu: bool
    kv_tokens: int  # that there is room for
    num_threads: int
    prompts: tuple[list[list[int]], ...]  # of each turn; of the first one, log-probabilities are wanted
    num_outputs: tuple[int, ...]  # tokens of each request
    longest: int  # tokens of a request, prompt and answer


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded."""

    version: str  # of llama-cpp-python
    options: ContextOptions
    num_sequences: int  # at the same time
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """How far all turns are, 0 to 1."""

    share: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn is done."""

    answers: tuple[Answer, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more will come."""

    reason: str


Message = Started | Share | Turn | Failed


def main() -> None:
    """Read a job from standard input, write messages to standard output, both pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between messages

    def send(message: Message) -> None:
        pickle.dump(message, output)
        output.flush()

    job: Job = pickle.load(sys.stdin.buffer)
    try:
        for message in work(job, load_library(), send):
            send(message)
    except (RuntimeError, MemoryError) as error:
        send(Failed(str(error)))


def work(job: Job, library: Any, send: Callable[[Message], None]) -> Iterator[Message]:
    """Answer each turn's prompts; RuntimeError where llama.cpp fails."""
    options = _context_options(job, library)
    context = Context(library, job.file, options)
    try:
        yield Started(library.__version__, options, context.num_sequences, context.batch_tokens)
        for index, prompts in enumerate(job.prompts):
            report = _reporter(send, index, len(job.prompts))
            yield Turn(*serve(context, prompts, job.num_outputs, report, 0 if index else TOP_LOGPROBS))
    finally:
        context.close()


def _reporter(send: Callable[[Message], None], turn: int, num_turns: int) -> Callable[[float], None]:
    shown = 0.0

    def report(share: float) -> None:
        nonlocal shown
        if share >= shown + _SHOWN_SHARE:
            shown = share
            send(Share((turn + share) / num_turns))

    return report


def _context_options(job: Job, library: Any) -> ContextOptions:
    """As many sequences at the same time as our cache would hold, each as long as the longest."""
    per_sequence = ceil(job.longest / _ROUNDING) * _ROUNDING
    most = min(job.kv_tokens // per_sequence, len(job.num_outputs), library.llama_max_parallel_sequences())
    return ContextOptions(
        dtype=job.dtype,
        num_sequences=max(most, 1),
        tokens_per_sequence=per_sequence,
        num_threads=job.num_threads,
        on_gpu=job.wants_gpu and bool(library.llama_supports_gpu_offload()),
    )
