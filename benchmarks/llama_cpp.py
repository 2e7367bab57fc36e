"""The same weights and requests through neo-desktop, then through llama.cpp's own server.

    python -m benchmarks.llama_cpp --shape qwen2.5-0.5b --dtype bfloat16 --requests 16 --input 64 --output 32

llama-cpp-python and its server answer one request after the other. `llama-server` batches waiting requests
(`--parallel`), as its users run it. It gets the same number format for weights and KV, threads, KV tokens and
simultaneous requests; for a GGUF file the same file. Prompts and answers are token ids over its HTTP
interface. Our model and caches are freed before, so a GPU has enough memory.
"""

import argparse
import contextlib
import importlib.util
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from neo_desktop.app.bench.workload import TOLERANCES, TOP_LOGPROBS, Answer, Workload, compare, run
from neo_desktop.app.engines.process import crash_signal
from neo_desktop.engine.batch import SampledToken, TokenLogprob
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.loading import load, model_path
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.engine.simulation.workload import synthetic
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.gguf.writer import ARCHITECTURES, write_gguf
from neo_desktop.models.rope import FactorScaling, LinearScaling, Llama3Scaling
from neo_desktop.models.weights import Packed

PROGRAM = "LLAMA_SERVER"  # environment variable: path of llama.cpp's server, if not on the PATH
_FILE_SLACK = 1.01  # metadata, padding, norms in 32 bits
_TOLERANCE = TOLERANCES[torch.float16]  # on the CPU its flash attention rounds to 16 bits for any KV
_QUANTISED_TOLERANCE = 0.4  # each program rounds inputs of quantised matmuls to 8 bits in its own way
_ROUNDING = 256  # KV of a sequence is a multiple of this many tokens
_KV_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_LINES_TOLD = 3  # last printed lines shown if it ends
_END_S = 2.0  # time for a server that hung up to end
_POLL_S = 0.05  # between two checks for the loaded model


def program() -> str | None:
    """Return the path of llama.cpp's server; None if not found."""
    return shutil.which(os.environ.get(PROGRAM, "llama-server"))


def gguf_checkpoint(model: Path) -> GGUFCheckpoint | None:
    """Return the checkpoint if llama.cpp can read it unchanged; raises as `open_checkpoint`."""
    checkpoint = open_checkpoint(model)
    return checkpoint if isinstance(checkpoint, GGUFCheckpoint) else None


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError for a model that llama.cpp computes differently, or that this module cannot write."""
    scaling, experts = config.rope.scaling, config.experts
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
    elif isinstance(scaling, Llama3Scaling | FactorScaling) and ARCHITECTURES[config.architecture] != "llama":
        reason = f"Llama 3's rotation in {config.architecture}"
    elif not isinstance(scaling, LinearScaling | Llama3Scaling | FactorScaling | None):
        reason = f"the rotation {type(scaling).__name__}"
    if reason is not None:
        raise ValueError(f"llama.cpp cannot run this model, because of {reason}: leave --baseline out")


def check_installed() -> None:
    """Raise ValueError with instructions if something is missing."""
    if program() is None:
        raise ValueError(
            "needs llama.cpp's llama-server on the PATH, or its path in the environment "
            f"variable {PROGRAM}: https://github.com/ggml-org/llama.cpp has it for every system"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("needs gguf: pip install 'neo-desktop[llamacpp]'")


@dataclass(frozen=True, slots=True)
class Rival:
    """Medians over the turns."""

    output_tokens_per_s: float
    lowest_output_tokens_per_s: float  # over the turns
    highest_output_tokens_per_s: float
    identical_answers: int  # equal to ours
    near_tie_answers: int  # differ from ours first at two nearly equally probable tokens
    other_answers: int
    settings: str  # server options


@dataclass(frozen=True, slots=True)
class _Job:
    """Input of llama.cpp."""

    workload: Workload
    prompts: list[list[list[int]]]  # by turn; we answered those of the first turn as well
    answers: tuple[Answer, ...]  # ours
    dtype: torch.dtype  # of weights and KV
    wants_gpu: bool
    kv_tokens: int  # capacity
    num_threads: int
    weights: str = ""  # format of a given file's weights; "": `dtype`


class LlamaCppBaseline:
    """Writes the model to a temporary file, which `close` removes.

    Args:
        given: the GGUF checkpoint of the policies, which llama.cpp reads directly. None: no GGUF file.
    """

    def __init__(self, given: GGUFCheckpoint | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="neo-desktop-")
        self._given = given
        self._file, self._printed = (Path(self._folder.name) / name for name in ("model.gguf", "printed"))
        if given is not None:
            self._file = given.file.path
        self._job: _Job | None = None
        self._process: subprocess.Popen[bytes]  # the server started last

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()

    def check(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Refuse at once a run that would fail after minutes.

        Raises:
            ValueError: the model is not one for llama.cpp.
            OSError: the disk has too little room.
        """
        if self._given is not None:
            return
        check_expressible(config)
        needed, free = _FILE_SLACK * config.weight_bytes(dtype), shutil.disk_usage(self._folder.name).free
        if needed > free:
            raise OSError(
                f"writes the weights to a temporary file of {needed / 1e9:.1f} GB, but "
                f"{self._folder.name} has {free / 1e9:.1f} GB free: name a folder with more room in TMPDIR"
            )

    def take(self, parts: EngineParts, workload: Workload, answers: tuple[Answer, ...], turns: int) -> None:
        """Write the model and remember the job; `answers` are ours of turn 0."""
        decoder = parts.model.decoder
        if self._given is None:
            write_gguf(importlib.import_module("gguf"), decoder, self._file)
        on_gpu = decoder.device.type == "cuda"
        gpu_tokens = parts.tokens_in(host_memory=False) if on_gpu else 0
        self._job = _Job(
            workload=workload,
            prompts=[workload.prompts(turn, decoder.config.vocab_size) for turn in range(turns + 1)],
            answers=answers,
            dtype=decoder.dtype,
            wants_gpu=on_gpu,
            kv_tokens=gpu_tokens or sum(parts.num_blocks.values()) * BLOCK_SIZE,
            num_threads=torch.get_num_threads(),
            weights="" if self._given is None else _told(self._given, decoder),
        )

    def turns(self, progress: Progress) -> Iterator[Rival]:
        """Answer turn 0's prompts to compare and warm up, then the prompts turn by turn; yield after every
        turn.

        Raises:
            RuntimeError: llama.cpp failed.
        """
        job = self._job
        assert job is not None, "`take` comes first"
        return_memory()
        progress(0.0, "llama.cpp: loading the model")
        requests = job.workload.requests
        outputs = sum(request.output_tokens for request in requests)
        with self._served(job) as (url, num_sequences, settings):
            runs: list[float] = []  # seconds
            for turn, prompts in enumerate(job.prompts):

                def tell(share: float, turn: int = turn) -> None:
                    progress((turn + share) / len(job.prompts), f"llama.cpp: {len(requests)} requests")

                counts = [request.output_tokens for request in requests]
                start = time.perf_counter()
                found = self._answers(url, prompts, counts, 0 if turn else TOP_LOGPROBS, num_sequences, tell)
                seconds = time.perf_counter() - start
                if turn == 0:
                    rounding = _QUANTISED_TOLERANCE if job.weights else _TOLERANCE
                    same = compare(found, job.answers, max(TOLERANCES[job.dtype], rounding))
                    continue
                runs.append(seconds)
                middle = statistics.median(runs)
                yield Rival(
                    output_tokens_per_s=outputs / middle,
                    lowest_output_tokens_per_s=outputs / max(runs),
                    highest_output_tokens_per_s=outputs / min(runs),
                    identical_answers=same.identical,
                    near_tie_answers=same.near_ties,
                    other_answers=same.changed,
                    settings=settings,
                )

    @contextmanager
    def _served(self, job: _Job) -> Iterator[tuple[str, int, str]]:
        """Run the server; yield its address, its number of slots and its settings.

        The slots are the longest requests that our cache would hold, or fewer if memory is short.
        """
        longest = max(request.total_tokens for request in job.workload.requests)
        tokens = ceil(longest / _ROUNDING) * _ROUNDING
        count = max(min(job.kv_tokens // tokens, len(job.workload.requests)), 1)
        on_gpu = job.wants_gpu and any(":" in each for each in _asked("--list-devices").splitlines()[1:])
        while True:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            process = self._process = self._started(job, port, count, count * tokens, on_gpu)
            url = f"http://127.0.0.1:{port}"
            try:
                if self._is_ready(process, url):
                    version = _asked("--version").partition("\n")[0].removeprefix("version: ")
                    dtype = str(job.dtype).removeprefix("torch.")
                    kind = (
                        f"weights {job.weights}, KV in {dtype}"
                        if job.weights
                        else f"weights and KV in {dtype}"
                    )
                    where = "the GPU" if on_gpu else f"the CPU with {job.num_threads} threads"
                    yield (
                        url,
                        count,
                        f"{version} on {where}: {kind}, {count} sequences of up to {tokens} tokens",
                    )
                    return
                if count == 1 or crash_signal(process.wait()) is not None:
                    raise RuntimeError(self._death(process))
            finally:
                process.kill()
                process.wait()
            count = count * 3 // 4

    def _started(
        self, job: _Job, port: int, count: int, kv_tokens: int, on_gpu: bool
    ) -> subprocess.Popen[bytes]:
        kind, threads = _KV_TYPES[job.dtype], str(job.num_threads)
        layers = ("-ngl", "999") if on_gpu else ("-ngl", "0", "--device", "none")
        arguments = (
            *("--model", str(self._file), "--host", "127.0.0.1", "--port", str(port), *layers),
            *("--parallel", str(count), "--ctx-size", str(kv_tokens), "--cache-ram", "0"),
            *("--threads", threads, "--threads-batch", threads),
            *("--cache-type-k", kind, "--cache-type-v", kind),
        )
        # llama.cpp, not our settings, chooses how OpenMP waits.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        with self._printed.open("wb") as printed:
            return subprocess.Popen(
                [str(program()), *arguments], stdout=printed, stderr=printed, env=environment
            )

    def _is_ready(self, process: subprocess.Popen[bytes], url: str) -> bool:
        """Wait for the loaded model; False if the server has ended."""
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/health"):
                    return True
            except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503: loading
                time.sleep(_POLL_S)
        return False

    def _answers(
        self,
        url: str,
        prompts: Sequence[Sequence[int]],
        num_outputs: Sequence[int],
        num_logprobs: int,
        num_sequences: int,
        progress: Callable[[float], None],
    ) -> list[Answer]:
        """Answer all prompts greedily; raises RuntimeError if llama.cpp fails."""

        def answer(prompt: Sequence[int], count: int) -> Answer:
            body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "cache_prompt": False}
            body |= {"return_tokens": True, "n_probs": num_logprobs, "ignore_eos": True}
            return _parsed(_posted(f"{url}/completion", body))

        # More than the slots, so that no slot waits for the client.
        pool = ThreadPoolExecutor(num_sequences + 4)
        futures = [pool.submit(answer, *each) for each in zip(prompts, num_outputs, strict=True)]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(done / len(futures))
        except OSError as error:
            if self._has_crashed():
                raise RuntimeError(self._death(self._process)) from error
            raise RuntimeError(f"llama.cpp's server failed: {error}; {self._last_lines()}") from error
        finally:  # running requests end with the server
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]

    def _has_crashed(self) -> bool:
        """True if the server that hung up has crashed, after some time for the system to notice."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return crash_signal(self._process.wait(_END_S)) is not None
        return False

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if (crash := crash_signal(code)) is not None:
            return (
                f"llama.cpp's server crashed ({crash}): its build fails on this processor. "
                f"Build llama.cpp again with -DGGML_NATIVE=OFF; {self._last_lines()}"
            )
        return f"llama.cpp's server ended with code {code}: {self._last_lines()}"

    def _last_lines(self) -> str:
        lines = self._printed.read_text(errors="replace").strip().splitlines()[-_LINES_TOLD:]
        return "; ".join(lines) or "it printed nothing"


def _told(given: GGUFCheckpoint, decoder: Decoder) -> str:
    """Return the format that both compute with."""
    is_kept = any(isinstance(linear, Packed) for linear in decoder.linears())
    dtype = str(decoder.dtype).removeprefix("torch.")
    became = "kept as stored" if is_kept else f"dequantised to {dtype}"
    return f"those of {given.file.path.name} itself, in {given.weights().stored_as} (here {became})"


def _asked(question: str) -> str:
    """Return the program's answer about itself."""
    said = subprocess.run([str(program()), question], capture_output=True, text=True, check=False)
    return (said.stdout + said.stderr).strip()


def _posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            data: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}: {error.read().decode(errors='replace')[:200]}") from None
    return data


def _parsed(reply: dict[str, Any]) -> Answer:
    if not (ranked := reply.get("completion_probabilities")):
        return tuple(map(SampledToken, reply["tokens"]))

    def of(entry: dict[str, Any]) -> TokenLogprob:
        return TokenLogprob(entry["id"], entry["logprob"])

    return tuple(SampledToken(e["id"], of(e), tuple(map(of, e["top_logprobs"]))) for e in ranked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="gpu-only")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    check_installed()
    options = EngineOptions(
        model=given.model, shape=given.shape, device=given.device, dtype=given.dtype, policy=given.policy
    )
    checkpoint = gguf_checkpoint(model_path(options.model)) if options.shape is None else None
    with contextlib.closing(LlamaCppBaseline(checkpoint)) as baseline:
        ours_first(baseline, options, given)
        *_, rival = baseline.turns(lambda share, what: print(f"{share:.0%} {what}", flush=True))
    print(f"llama.cpp: {rival}")


def ours_first(baseline: LlamaCppBaseline, options: EngineOptions, given: argparse.Namespace) -> None:
    """Answer all requests, print the speed, and hand the model to the baseline."""
    model = load(options)
    baseline.check(model.config, model.decoder.dtype)
    parts = take_memory(model, options)
    workload = Workload(tuple(synthetic(given.requests, given.input, given.output)))
    with contextlib.closing(Engine.from_parts(parts, given.policy)) as engine:
        found = []
        for turn in range(given.repeats + 1):  # the first turn is compared
            prompts = workload.prompts(turn, model.config.vocab_size)
            params = workload.params(None if turn else TOP_LOGPROBS)
            found.append(run(engine, prompts, params, lambda share: None))
        speeds = [each.output_tokens / each.seconds for each in found[1:]]
        print(f"neo-desktop, {given.policy}: {statistics.median(speeds):.1f} output tokens/s, turns {speeds}")
        baseline.take(parts, workload, found[0].answers, given.repeats)


if __name__ == "__main__":
    main()
