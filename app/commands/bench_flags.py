"""The options of `neo-desktop bench`, in the groups in which `--help` shows them."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from neo_desktop.app.commands import options as opt


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
    bool,
    typer.Option(
        "--random-weights",
        help="Confirm that --shape takes random weights; it always does.",
        rich_help_panel=_MODEL,
    ),
]


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """The requests of the suites throughput and load."""

    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
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
            help="Number of requests. Default: as many as the time allows.",
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
    ttft_limit_ms: Annotated[
        float | None,
        typer.Option(
            "--ttft-limit",
            min=0,
            metavar="MS",
            help="The longest time to the first token, for goodput. Default: 2000.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    tpot_limit_ms: Annotated[
        float | None,
        typer.Option(
            "--tpot-limit",
            min=0,
            metavar="MS",
            help="The longest time per further token, for goodput. Default: 200.",
            rich_help_panel=_LOAD,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """The files of the result."""

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
            help="Write the figures to this file and nothing else, unless --out is given as well.",
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
