"""The options of `neo-desktop bench`, in the groups in which `--help` shows them."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neo_desktop.app.commands import options as opt
from neo_desktop.engine.options import OPTIONS


class SuiteName(StrEnum):
    """A part of the self-test."""

    ALL = "all"
    HARDWARE = "hardware"
    CPU_ATTENTION = "cpu-attention"
    GPU = "gpu"
    WEIGHTS = "weights"
    COST_MODEL = "cost-model"
    THROUGHPUT = "throughput"
    LOAD = "load"


class Baseline(StrEnum):
    """Another program to measure on the same work."""

    LLAMA_CPP = "llama.cpp"


_MODEL, _RESULT, _WORKLOAD = "Model", "Result", "Suites throughput and load"
_LOAD, _CPU = "Suite load", "Suite cpu-attention"


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH",
        help="A Hugging Face checkpoint, a GGUF file, or 'builtin'. Default: random weights in a published "
        "shape that suits this computer's memory and speed.",
        rich_help_panel=_MODEL,
    ),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="What --shape means, to say it.", rich_help_panel=_MODEL)
]

if TYPE_CHECKING:
    _Policy = str
else:  # typer has no lists of literals
    _Policy = StrEnum("_Policy", {name: name for name in OPTIONS["policy"].choices})


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """What is asked of the model; for the suites throughput and load."""

    policy: Annotated[
        list[_Policy] | None,
        typer.Option(
            "--policy",
            help="Policies to set side by side; repeatable. Default: gpu-only and auto, where they differ.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    trace: opt.Trace = None
    input_tokens: opt.InputTokens = None
    output_tokens: opt.OutputTokens = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help="How many. Default: as many as the time allows.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed runs of each policy. Default: 3.", rich_help_panel=_WORKLOAD),
    ] = None
    seed: opt.Seed = 0


@dataclass(frozen=True, slots=True)
class BaselineFlags:
    """For the suite throughput."""

    baseline: Annotated[
        Baseline | None,
        typer.Option(
            help="Also measure another program with the same weights and requests; needs its llama-server on "
            "the PATH and pip install 'neo-desktop\\[llamacpp]'.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """For the suite load."""

    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            help="Requests per second; repeatable. Default: shares of what the machine turned out to bear.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    ttft_limit: Annotated[
        float | None,
        typer.Option(help="For goodput: ms to the first token. Default: 2000.", rich_help_panel=_LOAD),
    ] = None
    tpot_limit: Annotated[
        float | None,
        typer.Option(help="For goodput: ms per further token. Default: 200.", rich_help_panel=_LOAD),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure this OpenAI-compatible server, e.g. http://127.0.0.1:11434/v1, and nothing else.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    url_model: Annotated[
        str | None,
        typer.Option(help="Of that server. Default: the first that it lists.", rich_help_panel=_LOAD),
    ] = None


@dataclass(frozen=True, slots=True)
class CpuFlags:
    """For the suite cpu-attention."""

    kv_dtype: Annotated[
        opt.KVDtype | None,
        typer.Option("--kv-dtype", help="Number format of KV. Default: float16.", rich_help_panel=_CPU),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Threads. Default: all cores but two where there are more than four, else all.",
            rich_help_panel=_CPU,
        ),
    ] = None
    fragmented: Annotated[
        bool | None,
        typer.Option(
            "--fragmented",
            help="Scatter blocks one by one, the worst case, not in runs as the engine hands them out.",
            rich_help_panel=_CPU,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """Where the result goes."""

    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for report.html, report.md, report.json and the plots. Default: a new one here.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            callback=opt.in_existing_folder,
            help="Write the figures to this file and nothing else, unless --out is given, too.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json",
            help="Measure nothing: show two reports side by side.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    progress_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            hidden=True,
            help="For programs that run this one: a JSON line per step instead of a bar; '-': to stderr.",
        ),
    ] = None
