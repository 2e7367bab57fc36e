"""The command `neo-desktop bench`."""

import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neo_desktop.app import options as opt
from neo_desktop.app.terminal import progress_bar, set_up_logging, stdout

if TYPE_CHECKING:
    from neo_desktop.app.bench import Report

EXAMPLES = """Examples:

neo-desktop bench

neo-desktop bench --suite throughput --shape llama-3.1-8b --trace lengths.json --out my-machine

neo-desktop bench --url http://127.0.0.1:11434/v1 --rate 1 --rate 2 --rate 4

neo-desktop bench --gpu-slice 16 --gpu-memory 24

neo-desktop bench --compare before/report.json after/report.json
"""


class SuiteName(StrEnum):
    """A part of the self-test."""

    ALL = "all"
    HARDWARE = "hardware"
    CPU_ATTENTION = "cpu-attention"
    GPU = "gpu"
    COST_MODEL = "cost-model"
    THROUGHPUT = "throughput"
    LOAD = "load"


class Baseline(StrEnum):
    """Another program to measure on the same work."""

    LLAMA_CPP = "llama.cpp"


_RESULT, _WORKLOAD, _LOAD, _CPU = "Result", "Suites throughput and load", "Suite load", "Suite cpu-attention"
_BOTH = (SuiteName.THROUGHPUT, SuiteName.LOAD)
_SUITES_OF_OPTIONS = {
    "--kv-dtype": (SuiteName.CPU_ATTENTION,),
    "--threads": (SuiteName.CPU_ATTENTION,),
    "--fragmented": (SuiteName.CPU_ATTENTION,),
    "--trace": _BOTH,
    "--input": _BOTH,
    "--output": _BOTH,
    "--requests": _BOTH,
    "--repeats": _BOTH,
    "--policy": _BOTH,
    "--baseline": (SuiteName.THROUGHPUT,),
    "--rate": (SuiteName.LOAD,),
    "--url": (SuiteName.LOAD,),
    "--url-model": (SuiteName.LOAD,),
    "--ttft-limit": (SuiteName.LOAD,),
    "--tpot-limit": (SuiteName.LOAD,),
}


def bench(
    suite: Annotated[
        list[SuiteName] | None,
        typer.Option("--suite", help="What to measure; repeatable. Default: all of it, in about 3 minutes."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FOLDER",
            help="A Hugging Face checkpoint, or 'builtin'. Default: random weights in a shape that suits "
            "this computer; the built-in model for a single suite.",
            rich_help_panel="Model",
        ),
    ] = None,
    shape: opt.Shape = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="What --shape means, to say it.", rich_help_panel="Model"),
    ] = False,
    device: opt.DeviceOption = opt.Device.AUTO,
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    gpu_cache_tokens: opt.GpuCacheTokens = None,
    cpu_cache_tokens: opt.CpuCacheTokens = None,
    gpu_memory: opt.GpuMemory = None,
    gpu_slice: opt.GpuSlice = None,
    cpu_memory: opt.CpuMemory = None,
    cpu_cache_dtype: opt.CpuCacheDtypeOption = opt.CpuCacheDtype.AUTO,
    policy: Annotated[
        list[opt.PolicyName] | None,
        typer.Option(
            "--policy",
            help="Policies to set side by side; repeatable. Default: gpu-only and auto, where they differ.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    trace: opt.Trace = None,
    input_tokens: opt.InputTokens = None,
    output_tokens: opt.OutputTokens = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help="How many. Default: as many as the time allows.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed runs of each policy. Default: 3.", rich_help_panel=_WORKLOAD),
    ] = None,
    baseline: Annotated[
        Baseline | None,
        typer.Option(
            help="Also measure another program with the same weights and requests; needs "
            "pip install 'neo-desktop\\[llamacpp]'.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    seed: opt.Seed = 0,
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            help="Requests per second; repeatable. Default: shares of what the machine turned out to bear.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    ttft_limit: Annotated[
        float | None,
        typer.Option(help="For goodput: ms to the first token. Default: 2000.", rich_help_panel=_LOAD),
    ] = None,
    tpot_limit: Annotated[
        float | None,
        typer.Option(help="For goodput: ms per further token. Default: 200.", rich_help_panel=_LOAD),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure this OpenAI-compatible server, e.g. http://127.0.0.1:11434/v1, and nothing else.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="NEO_DESKTOP_BENCH_API_KEY", help="Of that server.", rich_help_panel=_LOAD),
    ] = None,
    url_model: Annotated[
        str | None,
        typer.Option(help="Of that server. Default: the first that it lists.", rich_help_panel=_LOAD),
    ] = None,
    kv_dtype: Annotated[
        opt.KVDtype | None,
        typer.Option("--kv-dtype", help="Number format of KV. Default: float16.", rich_help_panel=_CPU),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Threads. Default: all cores but two where there are more than four, else all.",
            rich_help_panel=_CPU,
        ),
    ] = None,
    fragmented: Annotated[
        bool | None,
        typer.Option(
            "--fragmented",
            help="Scatter blocks one by one, the worst case, not in runs as the engine hands them out.",
            rich_help_panel=_CPU,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for report.html, report.md, report.json and the plots. Default: a new one here.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the figures to this file and nothing else, unless --out is given, too.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json",
            help="Measure nothing: show two reports side by side.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Measure this computer: what it can run, how fast, and what offloading gains on it."""
    set_up_logging(debug)
    if compare is not None:
        _compare(*compare)
        return
    given = {
        "--kv-dtype": kv_dtype,
        "--threads": threads,
        "--fragmented": fragmented,
        "--trace": trace,
        "--input": input_tokens,
        "--output": output_tokens,
        "--requests": num_requests,
        "--repeats": repeats,
        "--policy": policy,
        "--baseline": baseline,
        "--rate": rates,
        "--url": url,
        "--url-model": url_model,
        "--ttft-limit": ttft_limit,
        "--tpot-limit": tpot_limit,
    }
    if url is not None and suite is None:
        suite = [SuiteName.LOAD]
    names = _chosen(suite, [name for name, value in given.items() if value is not None])
    if random_weights and shape is None:
        raise typer.BadParameter(
            "needs --shape NAME: there is no checkpoint to read", param_hint="--random-weights"
        )
    if trace is not None and (input_tokens, output_tokens) != (None, None):
        raise typer.BadParameter("give either --trace or --input and --output, not both")
    _check_slice(gpu_slice, baseline, url)

    import torch

    from neo_desktop.app.bench import run_suites
    from neo_desktop.app.bench.defaults import default_model, suite_options
    from neo_desktop.app.bench.page.files import discard_folder, prepare_folder, write_files
    from neo_desktop.app.model_options import ModelOptions
    from neo_desktop.engine.cuda.streams import open_streams
    from neo_desktop.engine.loading import choose_device

    open_streams(choose_device(device.value), gpu_slice)  # what cannot be is told before anything is made
    is_whole = len(names) > 1
    if model is None and shape is None and is_whole:
        shape = default_model(device.value, gpu_memory)
    requests = _given(
        trace=trace,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=num_requests,
        repeats=repeats,
        policies=None if policy is None else tuple(each.value for each in policy),
        seed=seed,
    )
    options = suite_options(
        ModelOptions(
            model=model or opt.DEFAULT_MODEL,
            shape=shape,
            device=device.value,
            dtype=dtype.value,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=cpu_cache_tokens,
            gpu_memory_gib=gpu_memory,
            gpu_slice=gpu_slice,
            cpu_memory_gib=cpu_memory,
            cpu_cache_dtype=cpu_cache_dtype.value,
        ),
        quick=is_whole,
        cpu_attention=_given(
            dtype=None if kv_dtype is None else getattr(torch, kv_dtype.value),
            num_threads=threads,
            fragmented=fragmented,
        ),
        throughput=requests | _given(llama_cpp=True if baseline is Baseline.LLAMA_CPP else None),
        load=requests
        | _given(
            rates=None if rates is None else tuple(rates),
            ttft_limit_ms=ttft_limit,
            tpot_limit_ms=tpot_limit,
            url=url,
            api_key=api_key if url is not None else None,
            url_model=url_model,
        ),
    )
    folder = out
    if out is None and json_file is None:
        folder = Path(f"neo-desktop-bench-{datetime.now():%Y-%m-%d-%H%M%S}")
    if folder is not None:
        prepare_folder(folder)
    with progress_bar() as progress:
        task = progress.add_task("Measuring", total=1.0)
        report = run_suites(
            names, lambda share, what: progress.update(task, completed=share, description=what), options
        )
    _show(report)
    if json_file is not None:
        report.write_json(json_file)
    if folder is not None and not report.suites:
        discard_folder(folder)
    elif folder is not None:
        page = write_files(report, folder)
        stdout.print(f"\nPage: [bold]{page}[/]", highlight=False, soft_wrap=True)
    if report.interrupted is not None:
        sys.exit(130)
    if report.has_failed:
        sys.exit(1)


def _chosen(suites: list[SuiteName] | None, given: list[str]) -> list[str]:
    """Return the suites to run, in their order; all of them unless some are named."""
    wanted = set(suites or [SuiteName.ALL])
    chosen = [each for each in SuiteName if each is not SuiteName.ALL and wanted & {each, SuiteName.ALL}]
    for name in given:
        if not any(each in _SUITES_OF_OPTIONS[name] for each in chosen):
            belongs = " or ".join(each.value for each in _SUITES_OF_OPTIONS[name])
            raise typer.BadParameter(f"{name} belongs to --suite {belongs}")
    return [each.value for each in chosen]


def _check_slice(gpu_slice: int | None, baseline: Baseline | None, url: str | None) -> None:
    """Refuse what a slice of the GPU does not confine."""
    if gpu_slice is None:
        return
    if baseline is not None:
        raise typer.BadParameter(
            f"{baseline.value} would have the whole GPU: leave --baseline out", param_hint="--gpu-slice"
        )
    if url is not None:
        raise typer.BadParameter(
            "the server at --url has its own settings: start that with a slice", param_hint="--gpu-slice"
        )


def _given(**settings: object) -> dict[str, object]:
    """Leave out what was not given."""
    return {name: value for name, value in settings.items() if value is not None}


def _show(report: "Report") -> None:
    from neo_desktop.app.bench.page.content import headline, machine_lines, sections
    from neo_desktop.app.bench.page.terminal import render_section

    for line in machine_lines(report):
        stdout.print(line, style="dim", highlight=False, markup=False)
    for section in sections(report):
        # Of a whole self-test, the terminal shows the figures; what is to be said of them is on the page.
        stdout.print(render_section(section, notes=len(report.suites) == 1), highlight=False)
    for line in headline(report):
        stdout.print(f"\n{line}", style="bold", highlight=False, markup=False)


def _compare(first: Path, second: Path) -> None:
    from neo_desktop.app.bench import Report
    from neo_desktop.app.bench.page.compare import compare
    from neo_desktop.app.bench.page.terminal import render_section

    reports = Report.read_json(first), Report.read_json(second)
    stdout.print(render_section(compare(*reports, (str(first), str(second)))), highlight=False)
