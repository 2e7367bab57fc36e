"""Check an installed neo-desktop on a GPU against its own CPU path, then measure it (see gpu_check.sh).

`neo-desktop doctor` runs first. Each part has its own process: one that fails, dies or hangs does not stop
the others. One page at the end shows working parts, fallbacks, speeds and targets. Exit code 1 if anything
failed.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import device_limit, weights_on_gpu
from benchmarks.shown import progress
from neo_desktop import Engine, SamplingParams, __version__
from neo_desktop.app.bench.hardware import run_hardware
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.section import render_section
from neo_desktop.app.commands.doctor_command import run_doctor
from neo_desktop.app.commands.terminal import stdout
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.doctor.first_start import check_at_first_start
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.profiling.budget import HOST_SHARE
from neo_desktop.engine.profiling.hardware import MachineInfo, host_memory, machine_info
from neo_desktop.models.shapes import shape as published_shape
from scripts.gpu_page import Page, Target, run_apart

SHAPES = ("llama-2-7b", "llama-3.2-3b", "llama-3.2-1b")
SHAPE_ON_CPU = "tiny"  # a CPU tests the script, not speed
LARGEST_BATCH, CONTEXT = 32, 512
BESIDE_BYTES = 4 * GIB  # GPU memory beside weights and KV: iterations, libraries, the display
STAGE_LIMIT_S = 2400.0
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


def fitting_shape(free_bytes: int) -> str:
    """Return the first shape that fits free GPU memory in float16, with the KV of the largest batch."""
    for name in SHAPES:
        config = published_shape(name)
        kv_bytes = LARGEST_BATCH * CONTEXT * config.kv_bytes_per_token(torch.float16)
        if config.weight_bytes(torch.float16) + kv_bytes + BESIDE_BYTES <= free_bytes:
            break
    return name


def cpu_cache_tokens(shape: str, most: int) -> int:
    """Return the tokens of KV that fit host memory with room to spare, at most `most`."""
    kv_bytes = int(HOST_SHARE * 0.8 * host_memory().available_bytes)
    return min(most, kv_bytes // published_shape(shape).kv_bytes_per_token(torch.float16))


def subject_of(device: str, shape: str | None) -> Subject:
    return Subject(shape=shape, device=device, is_quick=shape is not None)


def check_computer(page: Page, device: str, shape: str | None = None) -> None:
    """Run doctor's checks with the built-in model, and the quick ones with a shape."""
    report = run_doctor(
        subject_of(device, shape), refresh=True, progress=lambda what: print(f"doctor: {what}", flush=True)
    )
    report.print(stdout)
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
            cpu_cache_tokens=cpu_cache_tokens(shape, 8192),
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
            cpu_cache_tokens=None if policy == "gpu-only" else cpu_cache_tokens(shape, 500 * num_requests),
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


def check_kernels() -> None:
    """Compare the kernels with torch, and their bandwidth with a copy's."""
    from benchmarks import gpu_kernels, gpu_scans  # they need Triton

    gpu_kernels.check_kernels()
    gpu_scans.check_scans()


def run_tests() -> None:
    """Run the tests that need a GPU, and the kernel tests, which use one."""
    if importlib.util.find_spec("pytest") is None:
        print("tests: not run, since pytest is not installed")
        return
    failed = []
    for what in (["tests/kernels"], ["-m", "gpu", "tests/engine", "tests/graphs"]):
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", *what]
        if subprocess.run(command, check=False, cwd=Path(__file__).parents[1]).returncode:
            failed.append(" ".join(what))
    if failed:
        raise RuntimeError(f"see the output of pytest {', and of pytest '.join(failed)}")


def measure_hardware(page: Page, device: str, shape: str) -> None:
    """Measure the hardware alone, then single iterations beside its limit."""
    *_, hardware = run_hardware(BenchOptions(), progress)
    stdout.print(render_section(hardware.section()), highlight=False)
    options = EngineOptions(device=device, shape=None if device == "cpu" else shape)
    batches, context = ((1, 8, LARGEST_BATCH), CONTEXT) if device == "cuda" else ((1, 4), 64)
    for row in device_limit.measure(options, batches, context):
        page.speed(str(row))
        if row.batch:
            name = f"batch {row.batch}"
            page.targets.append(Target(f"{name}, share of the limit", row.share, SHARE_OF_LIMIT))
            outside = Target(f"{name}, outside ms", row.outside_ms, MOST_OUTSIDE_MS, is_upper=True)
            page.targets.append(outside)


def stages_of(page: Page, given: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the parts of the check by name, in order."""
    device, shape = given.device, given.shape
    sizes = given.requests, given.gpu_cache_tokens
    has_gpu = device == "cuda"
    stages: dict[str, Callable[[], object]] = {
        "doctor, built-in model": lambda: check_computer(page, device),
        f"doctor, {shape}": lambda: check_computer(page, device, shape),
    }
    if has_gpu:
        stages["kernels at the sizes of an 8B model"] = check_kernels
        stages["tests"] = run_tests
    stages |= {
        "log-probabilities are those of the CPU": lambda: check_logits(device),
        "the same tokens with every policy": lambda: check_policies(device),
        "hardware and single iterations": lambda: measure_hardware(page, device, shape),
        "decodes": lambda: measure_decode(page, device, shape),
        "policies": lambda: measure_policies(page, device, shape, *sizes),
    }
    if has_gpu:
        stages["weights in host memory"] = lambda: measure_weights(page, device, shape)
    if has_gpu and given.gpu_slice:
        part = given.gpu_slice, given.gpu_memory
        stages["policies on a slice"] = lambda: measure_policies(page, device, shape, *sizes, *part)
    return stages


def run_stage(name: str, given: argparse.Namespace) -> None:
    """Run one part, at the fallback levels that doctor found, and add its results to the page."""
    page = Page.load(given.page)
    work = stages_of(page, given)[name]

    def at_working_levels() -> None:
        for shape in () if name.startswith("doctor") else (None, given.shape):
            check_at_first_start(subject_of(given.device, shape), choose_device(given.device))
        work()

    page.stage(name, at_working_levels)
    fell_back = [f"{s.mechanism.title}: {s.level.what} ({s.reason})" for s in fallbacks.states() if s.reason]
    page.fell_back += [line for line in fell_back if line not in page.fell_back]
    page.save(given.page)


def described(machine: MachineInfo, device: str) -> str:
    """Return a report's first line."""
    gpu = machine.gpus[0] if device == "cuda" and machine.gpus else None
    where = "CPU" if gpu is None else f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB, driver {gpu.driver})"
    host = f"{machine.cpu}, {machine.usable_cores} threads, {machine.memory_bytes / GIB:.0f} GiB"
    return f"neo-desktop {__version__} on {where}, {host}, {machine.platform}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--shape",
        help=f"for the measurements; default: the first that fits of {', '.join(SHAPES)}; on a CPU tiny",
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--gpu-cache-tokens", type=int, default=1000)
    parser.add_argument(
        "--gpu-slice",
        type=int,
        help="SMs that stand for a small GPU; 0: none; default: 8 of a card with more than 100",
    )
    parser.add_argument("--gpu-memory", type=float, default=15.0, help="GiB of it")
    parser.add_argument("--only", action="append", metavar="PART", help="run this part; may be repeated")
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)  # of a part's own process
    given = parser.parse_args()
    if given.page is not None:
        run_stage(given.only[0], given)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit(why_unusable() or "torch finds no NVIDIA GPU")
    machine = machine_info()
    gpu = machine.gpus[0] if given.device == "cuda" else None
    if given.shape is None:
        given.shape = SHAPE_ON_CPU if gpu is None else fitting_shape(gpu.free_bytes)
    if given.gpu_slice is None:
        given.gpu_slice = 8 if gpu is not None and (gpu.sms or 0) > 100 else 0
    page = Page(described(machine, given.device))
    names = list(stages_of(page, given))
    for unknown in set(given.only or ()).difference(names):
        parser.error(f"there is no part {unknown!r}; the parts are: {'; '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.json")
        page.save(path)
        for name in given.only or names:
            options = vars(given) | {"only": name, "page": path}
            command = [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
            reason = run_apart([sys.executable, __file__, *command], STAGE_LIMIT_S)
            page = Page.load(path)
            if reason is not None:
                page.failed.append(f"{name}: {reason}")
                page.save(path)
    print(*page.lines(), sep="\n")
    sys.exit(1 if page.failed else 0)


if __name__ == "__main__":
    main()
