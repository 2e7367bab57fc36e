"""Check an installed neo-desktop on a GPU against its own CPU path, then measure it (see gpu_check.sh).

`neo-desktop doctor` runs first. A failed part does not stop the others. One page at the end shows working
parts, fallbacks, speeds and targets. Exit code 1 if anything failed.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import device_limit, weights_on_gpu
from benchmarks.shown import progress
from neo_desktop import Engine, SamplingParams, __version__
from neo_desktop.app.bench.hardware import run_hardware
from neo_desktop.app.bench.options import HardwareOptions
from neo_desktop.app.bench.section import render_section
from neo_desktop.app.commands.doctor_command import run_doctor
from neo_desktop.app.commands.terminal import stdout
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.options import EngineOptions
from scripts.gpu_page import Page, Target

SHAPES = {"cuda": "llama-2-7b", "cpu": "tiny"}  # a CPU tests the script, not speed
WORST_AUTO = 0.97  # minimum, relative to gpu-only
SHARE_OF_LIMIT = 0.9  # minimum, relative to the hardware's limit for a decode
OVER_LAYERS = 1.2  # minimum speedup over whole layers on either side, with weights in host memory
MOST_OUTSIDE_MS = 1.0  # maximum wait of the device between two iterations
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=20)

new_engine = partial(Engine.from_pretrained, disk_cache_gib=0.0)  # every prompt is computed


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (1, 17, 40, 200, 600)]


def first_logprobs(engine: Engine) -> list[dict[int, float]]:
    """Return, per prompt, `token` → log-probability of the most probable first tokens."""
    outputs = engine.generate(prompts(engine.config.vocab_size), GREEDY)
    return [{top.token_id: top.logprob for top in output.tokens[0].top_logprobs} for output in outputs]


def check_logits(device: str) -> None:
    """Compare first-token log-probabilities with float32 on the CPU, within the dtype's tolerance."""
    with new_engine(device="cpu", dtype="float32") as engine:
        reference = first_logprobs(engine)
    for dtype, tolerance in (("float32", 1e-3), ("float16", 2e-2), ("bfloat16", 2e-1)):
        if dtype == "bfloat16" and device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            continue
        with new_engine(device=device, dtype=dtype) as engine:
            found = first_logprobs(engine)
        error = max(
            abs(expected[token] - logprob)
            for expected, got in zip(reference, found, strict=True)
            for token, logprob in got.items()
            if token in expected
        )
        print(f"logits {dtype}: largest difference to the CPU in float32 {error:.1e} (tolerance {tolerance})")
        assert error <= tolerance


def check_policies(device: str) -> None:
    """Check for equal tokens in every KV tier, with KV of up to ten times the GPU-cache."""
    batch = [prompt for _ in range(4) for prompt in prompts(3000)]
    results: list[list[tuple[int, ...]]] = []
    # The last value is GiB of weights on the GPU; the rest is in host memory.
    caches = (
        ("gpu-only", None, None),
        ("gpu-only", 1024, None),
        ("fastdecode", None, None),
        ("neo", 400, None),
        ("auto", 400, None),
        ("auto", 0, None),
        ("gpu-only", None, 0.006),
        ("auto", 400, 0.012),
    )
    for policy, gpu_cache_tokens, gpu_weights_gib in caches:
        with new_engine(
            device=device,
            dtype="float32",
            policy=policy,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=None if policy == "gpu-only" else 16_384,
            gpu_weights_gib=gpu_weights_gib,
        ) as engine:
            outputs = engine.generate(batch, GREEDY)
            results.append([output.token_ids for output in outputs])
            stats = engine.stats()
            print(
                f"policy {policy}, GPU-cache {gpu_cache_tokens}, weights {gpu_weights_gib}: "
                f"{stats.num_cpu_decodes} CPU decodes, "
                f"{stats.num_double_iterations} of {stats.num_iterations} iterations with two sub-batches, "
                f"{stats.num_moves} moves, {stats.num_preemptions} preemptions"
            )
    first, *others = results
    assert all(other == first for other in others), "a policy changed the tokens"
    with new_engine(device="cpu", dtype="float32") as engine:
        expected = [output.token_ids for output in engine.generate(batch, GREEDY)]
    same = sum(tokens == wanted for tokens, wanted in zip(first, expected, strict=True))
    print(f"{same} of {len(batch)} answers of {GREEDY.max_tokens} tokens are those of the CPU")
    assert same >= 0.9 * len(batch), "the GPU's answers are not the CPU's"  # near ties may go either way


def check_computer(page: Page, device: str, shape: str | None = None) -> None:
    """Run doctor's checks with the built-in model, and the quick ones with a shape."""
    subject = Subject(shape=shape, device=device, is_quick=shape is not None)
    report = run_doctor(subject, refresh=True, progress=lambda what: print(f"doctor: {what}", flush=True))
    report.print(stdout)
    report.verdict.apply(fallbacks)
    what = shape or "built-in model"
    for outcome in report.verdict.failed:
        page.fell_back.append(f"{what}, {outcome.title}: {outcome.result} ({outcome.reason})")
    if report.verdict.lost or not report.verdict.has_begun:
        raise RuntimeError("what failed has nothing in its place")
    print(*report.conclusion(), sep="\n")


def measure_decode(page: Page, device: str, shape: str) -> None:
    """Measure decode throughput with random weights, by batch size and KV tier."""
    for batch, (policy, gpu_cache_tokens) in product((1, 8), (("gpu-only", None), ("fastdecode", None))):
        with new_engine(
            device=device,
            shape=shape,
            policy=policy,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=8192,
        ) as engine:
            tokens = [[7] * 400 for _ in range(batch)]
            engine.generate(tokens, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            started_s = time.perf_counter()
            engine.generate(tokens, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
            elapsed_s = time.perf_counter() - started_s
            page.speed(f"{shape}, batch {batch}, {policy}: {batch * 64 / elapsed_s:.1f} output tok/s")


def measure_weights(page: Page, device: str, shape: str) -> None:
    """Measure one chat with weights in host memory: divided, streamed, and whole layers on the CPU."""
    found = {}
    for case in weights_on_gpu.measure(EngineOptions(device=device, shape=shape), shares=(0.5, 0.9)):
        page.speed(str(case))
        found[case.share, case.way] = case
    for (share, way), case in found.items():
        if way == "divided":
            name = f"{share:.0%} of the layers' weights on the GPU"
            page.targets.append(
                Target(f"{name}, of what CPU and bus allow", case.bound_share, SHARE_OF_LIMIT)
            )
            if layers := found.get((share, "layer split")):
                gain = case.tokens_per_s / layers.tokens_per_s
                page.targets.append(Target(f"{name}, over a layer split", gain, OVER_LAYERS))


def measure_policies(
    page: Page,
    device: str,
    shape: str,
    num_requests: int,
    gpu_cache_tokens: int,
    gpu_slice: int | None = None,
    gpu_memory_gib: float | None = None,
) -> None:
    """Measure offloading with scarce GPU memory: all requests at once, of the lengths of summaries."""
    rng = random.Random(0)
    lengths = [(rng.randint(300, 440), rng.randint(30, 60)) for _ in range(num_requests)]
    requests = [[rng.randrange(200) for _ in range(size)] for size, _ in lengths]
    params = [SamplingParams(max_tokens=size, temperature=0.0, ignore_eos=True) for _, size in lengths]
    num_tokens = sum(size for _, size in lengths)
    baseline = None
    for policy in ("gpu-only", "neo", "auto"):
        started_s = time.perf_counter()
        with new_engine(
            device=device,
            shape=shape,
            policy=policy,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=None if policy == "gpu-only" else 500 * num_requests,
            gpu_slice=gpu_slice,
            gpu_memory_gib=gpu_memory_gib,
        ) as engine:
            ready_s = time.perf_counter()
            outputs = engine.generate(requests, params)
            elapsed_s = time.perf_counter() - ready_s
            assert all(
                len(output.token_ids) == size for output, (_, size) in zip(outputs, lengths, strict=True)
            )
            baseline = baseline or elapsed_s
            stats = engine.stats()
            on = "" if gpu_slice is None else f"on {stats.gpu_sms} SMs: "
            if policy == "auto":
                name = f"{on}{shape}, {num_requests} requests, auto against gpu-only"
                page.targets.append(Target(name, baseline / elapsed_s, WORST_AUTO))
            page.speed(
                f"{on}{shape}, {num_requests} requests, GPU-cache {gpu_cache_tokens} tokens, {policy}: "
                f"{num_tokens / elapsed_s:.1f} output tok/s, {baseline / elapsed_s:.2f}x gpu-only "
                f"({stats.num_iterations} iterations, {stats.num_double_iterations} with two sub-batches, "
                f"{stats.num_cpu_decodes} CPU decodes; start-up {ready_s - started_s:.1f} s)"
            )


def run_tests() -> None:
    """Run the tests that need a GPU, and the kernel tests, which use one."""
    if importlib.util.find_spec("pytest") is None:
        print("tests: not run, since pytest is not installed")
        return
    for what in (["tests/kernels"], ["-m", "gpu", "tests/engine", "tests/graphs"]):
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", *what]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])


def measure_hardware(page: Page, device: str) -> None:
    """Measure the hardware alone, then single iterations beside its limit."""
    *_, hardware = run_hardware(HardwareOptions(seconds=15.0), progress)
    stdout.print(render_section(hardware.section()), highlight=False)
    options = EngineOptions(device=device, shape=None if device == "cpu" else SHAPES["cuda"])
    batches, context = ((1, 8, 32), 512) if device == "cuda" else ((1, 4), 64)
    for row in device_limit.measure(options, batches, context):
        page.speed(str(row))
        if row.batch:
            name = f"batch {row.batch}"
            page.targets.append(Target(f"{name}, share of the limit", row.share, SHARE_OF_LIMIT))
            outside = Target(f"{name}, outside ms", row.outside_ms, MOST_OUTSIDE_MS, is_upper=True)
            page.targets.append(outside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=tuple(SHAPES))
    parser.add_argument(
        "--shape", help=f"for the measurements; default: {SHAPES['cuda']}, on a CPU {SHAPES['cpu']}"
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--gpu-cache-tokens", type=int, default=1000)
    parser.add_argument("--gpu-slice", type=int, default=8, help="SMs that stand for a small GPU")
    parser.add_argument("--gpu-memory", type=float, default=15.0, help="GiB of it")
    arguments = parser.parse_args()
    device = arguments.device
    shape = arguments.shape or SHAPES[device]
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; neo-desktop info says why")
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    page = Page(f"neo-desktop {__version__} on {where}, torch {torch.__version__}")
    page.stage("doctor, built-in model", lambda: check_computer(page, device))
    page.stage(f"doctor, {shape}", lambda: check_computer(page, device, shape))
    if device == "cuda":
        from benchmarks.gpu_kernels import check_kernels

        page.stage("kernels at the sizes of an 8B model", check_kernels)
        page.stage("tests", run_tests)
    page.stage("log-probabilities are those of the CPU", lambda: check_logits(device))
    page.stage("the same tokens with every policy", lambda: check_policies(device))
    page.stage("hardware and single iterations", lambda: measure_hardware(page, device))
    page.stage("decodes", lambda: measure_decode(page, device, shape))
    sizes = arguments.requests, arguments.gpu_cache_tokens
    page.stage("policies", lambda: measure_policies(page, device, shape, *sizes))
    if device == "cuda":
        page.stage("weights in host memory", lambda: measure_weights(page, device, shape))
        part = arguments.gpu_slice, arguments.gpu_memory
        page.stage("policies on a slice", lambda: measure_policies(page, device, shape, *sizes, *part))
    page.fell_back += [
        f"{s.mechanism.title}: {s.level.what} ({s.reason})" for s in fallbacks.states() if s.reason
    ]
    print(*page.lines(), sep="\n")
    sys.exit(1 if page.failed else 0)


if __name__ == "__main__":
    main()
