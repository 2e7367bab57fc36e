"""The command `neo-desktop bench`."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer

from neo_desktop.app.bench.options import BenchOptions, Suite
from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.flags import Without, with_flags
from neo_desktop.app.commands.terminal import loading_bar, stdout
from neo_desktop.engine.options import OPTIONS

EXAMPLES = """Examples:

neo-desktop bench

neo-desktop bench --suite throughput --shape llama-3.1-8b --out my-machine

neo-desktop bench --gpu-slice 16 --gpu-memory 24
"""


@with_flags
def bench(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="PATH",
            help="A Hugging Face checkpoint, a GGUF file, or 'builtin'. Default: random weights in a "
            "published shape that suits this computer's memory and speed.",
            rich_help_panel="Model",
        ),
    ] = None,
    options: Annotated[
        BenchOptions, Without("policy", "trace_timeline", "host_reserve_gib", "disk_cache_gib")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for report.html and report.json. Default: a new one here.",
        ),
    ] = None,
    progress_json: Annotated[
        bool, typer.Option("--progress-json", hidden=True, help="Write a JSON line per step to stderr.")
    ] = False,
    suite: Annotated[
        list[Suite] | None,
        typer.Option("--suite", help="What to measure; repeatable. Default: all of it, in a few minutes."),
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Measure this computer: what it can run, how fast, and what offloading gains on it."""
    names = [each for each in Suite if not suite or each in suite]
    for policy in options.policies or ():
        if policy not in (known := OPTIONS["policy"].choices):
            message = f"{policy!r} is unknown; choose from: {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--policy")
    if options.tensor_parallel > 1 and names != [Suite.LOAD]:
        message = "divided models are measured by --suite load alone"
        raise typer.BadParameter(message, param_hint="--tensor-parallel")
    from neo_desktop.app.bench.run import default_model, run_suites
    from neo_desktop.app.shelf.catalogue import with_model
    from neo_desktop.engine.cuda.streams import open_streams
    from neo_desktop.engine.loading import choose_device

    # Fail before anything is made.
    open_streams(choose_device(options.device), options.gpu_slice)
    note = ""
    if model is not None:
        options = with_model(options, model)
    elif names != [Suite.HARDWARE] and options.shape is None:
        chosen, note = default_model(options.device, options.gpu_memory_gib)
        options = replace(options, shape=chosen)
    folder = out or Path(f"neo-desktop-bench-{datetime.now():%Y-%m-%d-%H%M%S}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            nullcontext(json_progress(sys.stderr)) if progress_json else loading_bar("Measuring") as progress
        ):
            report = run_suites(names, progress, options, note)
        report.print(stdout)
        if report.suites:
            page = report.write_files(folder)
            stdout.print(f"\nPage: [bold]{page}[/]", highlight=False, soft_wrap=True)
    finally:
        with suppress(OSError):  # it holds the report
            folder.rmdir()
    if report.interrupted is not None:
        sys.exit(130)
    if report.has_failed:
        sys.exit(1)


def json_progress(lines: TextIO) -> Callable[[float, str], None]:
    """Return a function that writes `{"share": 0.4, "what": "warming up"}` whenever one of the two changed.

    `share` has three decimals: a suite that reports every iteration writes a thousand lines at most.
    """
    last: dict[str, object] = {}

    def write(share: float, what: str) -> None:
        nonlocal last
        step: dict[str, object] = {"share": round(share, 3), "what": what}
        if step != last:
            lines.write(json.dumps(step) + "\n")
            lines.flush()
            last = step

    return write
