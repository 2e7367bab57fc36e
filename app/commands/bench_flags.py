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
    THROUGHPUT = "throughput"
    LOAD = "load"


_MODEL, _RESULT, _WORKLOAD = "Model", "Result", "Suites throughput and load"
_LOAD = "Suite load"


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
    seed: opt.Seed = 0


@dataclass(frozen=True, slots=True)
class ThroughputFlags:
    """For the suite throughput."""

    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Timed runs of each policy. Default: 3.", rich_help_panel="Suite throughput"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """For the suite load."""

    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            min=0.01,
            help="Requests per second; repeatable. Default: shares of what the machine turned out to bear.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    ttft_limit: Annotated[
        float | None,
        typer.Option(min=0, help="For goodput: ms to the first token. Default: 2000.", rich_help_panel=_LOAD),
    ] = None
    tpot_limit: Annotated[
        float | None,
        typer.Option(min=0, help="For goodput: ms per further token. Default: 200.", rich_help_panel=_LOAD),
    ] = None


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """Where the result goes."""

    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for report.html and report.json. Default: a new one here.",
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
    progress_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            hidden=True,
            help="For programs that run this one: a JSON line per step instead of a bar; '-': to stderr.",
        ),
    ] = None
