"""The same weights and requests through neo-desktop, then through llama.cpp's own server.

    python -m benchmarks.llama_cpp --shape qwen2.5-0.5b --dtype bfloat16 --requests 16 --input 64 --output 32

llama-cpp-python and its server answer one request after the other. `llama-server` batches waiting requests
(`--parallel`), as its users run it. It gets the same number format for weights and KV, threads, KV tokens and
simultaneous requests; for a GGUF file the same file. Prompts and answers are token ids over its HTTP
interface. Our model and caches are freed before, so a GPU has enough memory.

It needs `pip install 'neo-desktop[llamacpp]'`, and `llama-server` on the PATH or its path in LLAMA_SERVER.
"""

import argparse
import importlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from benchmarks.gguf_writer import ARCHITECTURES, has_linear_rope, write_gguf
from benchmarks.shown import model_arguments
from neo_desktop.app.bench.workload import TOLERANCES, TOP_LOGPROBS, Answer, Workload, compare, run
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.loading import load, model_path
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.setup import take_memory
from neo_desktop.engine.simulation.workload import synthetic
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint

PROGRAM = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server")) or "llama-server"
TOLERANCE = TOLERANCES[torch.float16]  # on the CPU its flash attention rounds to 16 bits for any KV
QUANTISED_TOLERANCE = 0.4  # each program rounds inputs of quantised matmuls to 8 bits in its own way
ROUNDING = 256  # KV of a sequence is a multiple of this many tokens
KV_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError for a model that llama.cpp computes differently, or that this module cannot write."""
    rope, experts = config.rope, config.experts
    reason = None
    if config.architecture not in ARCHITECTURES:
        reason = f"the architecture {config.architecture}"
    elif config.attention_sinks:
        reason = "attention sinks"
    elif any(window is not None for window in config.layer_windows):
        reason = "sliding windows"
    elif experts is not None and len(experts.layers) < config.num_layers:
        reason = "a mix of dense layers and layers with experts"
    elif experts is not None and not experts.normalises:
        reason = "weights of experts that are not normalised"
    elif rope.stretched_tokens:
        reason = "YaRN's rotation"
    elif rope.factors and not has_linear_rope(config) and ARCHITECTURES[config.architecture] != "llama":
        reason = f"Llama 3's rotation in {config.architecture}"
    if reason is not None:
        raise ValueError(f"llama.cpp cannot run this model, because of {reason}: choose another one")


@dataclass(frozen=True, slots=True)
class Ours:
    """Our answers, and what llama.cpp needs to do the same."""

    workload: Workload
    prompts: list[list[list[int]]]  # by turn; answers of turn 0 are compared
    answers: tuple[Answer, ...]
    dtype: torch.dtype  # of weights and KV
    is_on_gpu: bool
    kv_tokens: int


def answer_ourselves(options: EngineOptions, given: argparse.Namespace, file: Path | None) -> Ours:
    """Answer all requests, print the speed, and write the model to the file; None: it is a file already."""
    model = load(options)
    decoder, vocab_size = model.decoder, model.config.vocab_size
    if file is not None:
        check_expressible(model.config)
    parts = take_memory(model, options)
    workload = Workload(tuple(synthetic(given.requests, given.input, given.output)), 0)
    prompts = [workload.prompts(turn, vocab_size) for turn in range(given.repeats + 1)]
    with closing(Engine.from_parts(parts, given.policy)) as engine:
        found = [
            run(engine, each, workload.params(None if turn else TOP_LOGPROBS), lambda share: None)
            for turn, each in enumerate(prompts)
        ]
    told(f"neo-desktop, {given.policy}", [each.output_tokens / each.seconds for each in found[1:]])
    if file is not None:
        write_gguf(importlib.import_module("gguf"), decoder, file)
    on_gpu = decoder.device.type == "cuda"
    tokens = parts.tokens_in(host_memory=False) if on_gpu else 0
    kv_tokens = tokens or sum(parts.num_blocks.values()) * BLOCK_SIZE
    return Ours(workload, prompts, found[0].answers, decoder.dtype, on_gpu, kv_tokens)


@contextmanager
def server(ours: Ours, file: Path) -> Iterator[tuple[str, int]]:
    """Start llama.cpp's server; yield its address and its number of slots.

    The slots are the longest requests that our cache would hold.
    """
    longest = max(request.total_tokens for request in ours.workload.requests)
    tokens = ceil(longest / ROUNDING) * ROUNDING
    count = max(min(ours.kv_tokens // tokens, len(ours.workload.requests)), 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kind, threads = KV_TYPES[ours.dtype], str(torch.get_num_threads())
    layers = ("-ngl", "999") if ours.is_on_gpu else ("-ngl", "0", "--device", "none")
    command = [
        PROGRAM,
        *("--model", str(file), "--host", "127.0.0.1", "--port", str(port), *layers),
        *("--parallel", str(count), "--ctx-size", str(count * tokens), "--cache-ram", "0"),
        *("--threads", threads, "--threads-batch", threads),
        *("--cache-type-k", kind, "--cache-type-v", kind),
    ]
    # llama.cpp, not our settings, chooses how OpenMP waits.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    raise SystemExit(f"llama.cpp's server ended with code {process.returncode}")
                time.sleep(0.05)
            yield url, count
        finally:
            process.kill()


def is_ready(url: str) -> bool:
    """Return True if the model is loaded."""
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503: loading
        return False


def answers(
    url: str, prompts: Sequence[Sequence[int]], counts: Sequence[int], num_logprobs: int, slots: int
) -> list[Answer]:
    """Answer all prompts greedily."""

    def answer(prompt: Sequence[int], count: int) -> Answer:
        body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "cache_prompt": False}
        body |= {"return_tokens": True, "n_probs": num_logprobs, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            return parsed(json.load(reply))

    # More than the slots, so that no slot waits for the client.
    with ThreadPoolExecutor(slots + 4) as pool:
        return list(pool.map(answer, prompts, counts))


def parsed(reply: dict[str, Any]) -> Answer:
    if not (ranked := reply.get("completion_probabilities")):
        return tuple(map(SampledToken, reply["tokens"]))

    def of(entry: dict[str, Any]) -> TokenLogprob:
        return TokenLogprob(entry["id"], entry["logprob"])

    return tuple(SampledToken(e["id"], of(e), tuple(map(of, e["top_logprobs"]))) for e in ranked)


def told(name: str, speeds: Sequence[float]) -> None:
    """Print the turns' output tokens per second."""
    turns = ", ".join(f"{speed:.1f}" for speed in speeds)
    print(f"{name}: {statistics.median(speeds):.1f} output tokens/s, turns {turns}", flush=True)


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--policy", default="gpu-only")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    options = EngineOptions(
        model=given.model, shape=given.shape, device=given.device, dtype=given.dtype, policy=given.policy
    )
    checkpoint = None if given.shape else open_checkpoint(model_path(options.model))
    is_file = isinstance(checkpoint, GGUFCheckpoint)
    with tempfile.TemporaryDirectory(prefix="neo-desktop-") as folder:
        file = checkpoint.file.path if isinstance(checkpoint, GGUFCheckpoint) else Path(folder, "model.gguf")
        ours = answer_ourselves(options, given, None if is_file else file)
        return_memory()
        counts = [request.output_tokens for request in ours.workload.requests]
        with server(ours, file) as (url, slots):
            speeds = []
            for turn, prompts in enumerate(ours.prompts):
                start = time.perf_counter()
                found = answers(url, prompts, counts, 0 if turn else TOP_LOGPROBS, slots)
                speeds.append(sum(counts) / (time.perf_counter() - start))
                if turn == 0:
                    rounding = QUANTISED_TOLERANCE if is_file else TOLERANCE
                    print(compare(found, ours.answers, max(TOLERANCES[ours.dtype], rounding)))
        told(f"llama.cpp, {slots} sequences", speeds[1:])


if __name__ == "__main__":
    main()
