"""The command `neo-desktop bench`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from neo_desktop.app.bench.options import SUITES_OF, WITHOUT_FLAG, BenchOptions, SuiteName
from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.flags import Without, flag_of, given, with_flags
from neo_desktop.app.commands.terminal import progress_bar, set_up_logging, stdout
from neo_desktop.engine.options import OPTIONS

if TYPE_CHECKING:
    from neo_desktop.app.bench.report import Report

EXAMPLES = """Examples:

neo-desktop bench

neo-desktop bench --suite throughput --shape llama-3.1-8b --trace lengths.json --out my-machine

neo-desktop bench --suite load --rate 1 --rate 2 --rate 4

neo-desktop bench --gpu-slice 16 --gpu-memory 24
"""

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH",
        help="A Hugging Face checkpoint, a GGUF file, or 'builtin'. Default: random weights in a published "
        "shape that suits this computer's memory and speed.",
        rich_help_panel="Model",
    ),
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Confirm that --shape takes random weights; it always does.",
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """The files of the result."""

    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for report.html and report.json. Default: a new one here.",
            rich_help_panel="Result",
        ),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            callback=opt.in_existing_folder,
            help="Write the figures to this file and nothing else, unless --out is given as well.",
            rich_help_panel="Result",
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


@with_flags
def bench(
    *,
    model: Model = None,
    options: Annotated[
        BenchOptions, Without("policy", "trace_timeline", "host_reserve_gib", "disk_cache_gib", *WITHOUT_FLAG)
    ],
    random_weights: RandomWeights = False,
    result: ResultFlags,
    suite: Annotated[
        list[SuiteName] | None,
        typer.Option("--suite", help="What to measure; repeatable. Default: all of it, in a few minutes."),
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Measure this computer: what it can run, how fast, and what offloading gains on it."""
    set_up_logging(debug)
    names = _chosen(suite, options)
    if random_weights and options.shape is None:
        raise typer.BadParameter(
            "needs --shape NAME: there is no checkpoint to read", param_hint="--random-weights"
        )
    if options.trace is not None and (options.input_tokens, options.output_tokens) != (None, None):
        raise typer.BadParameter("give either --trace or --input and --output, not both")
    for policy in options.policies or ():
        if policy not in OPTIONS["policy"].choices:
            known = ", ".join(OPTIONS["policy"].choices)
            raise typer.BadParameter(f"{policy!r} is unknown; choose from: {known}", param_hint="--policy")
    if options.tensor_parallel > 1 and names != [SuiteName.LOAD]:
        raise typer.BadParameter(
            "divided models are measured by --suite load alone", param_hint="--tensor-parallel"
        )
    from neo_desktop.app.bench.run import default_model
    from neo_desktop.app.shelf.catalogue import with_model
    from neo_desktop.engine.cuda.streams import open_streams
    from neo_desktop.engine.loading import choose_device

    # Fail before anything is made.
    open_streams(choose_device(options.device), options.gpu_slice)
    note = ""
    if model is not None:
        options = with_model(options, model)
    elif names != [SuiteName.HARDWARE] and options.shape is None:
        suitable = default_model(options.device, options.gpu_memory_gib)
        options, note = replace(options, shape=suitable.shape), suitable.note
    _measure(names, replace(options, is_quick=len(names) > 1), note, result)


def _measure(names: list[SuiteName], options: BenchOptions, model_note: str, result: ResultFlags) -> None:
    """Run the suites; show and write what they found."""
    from neo_desktop.app.bench.page.html import write_files
    from neo_desktop.app.bench.run import run_suites

    folder = result.out
    if folder is None and result.json_file is None:
        folder = Path(f"neo-desktop-bench-{datetime.now():%Y-%m-%d-%H%M%S}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # before anything is measured
    try:
        with _progress(result.progress_json) as progress:
            report = run_suites([name.value for name in names], progress, options, model_note)
    except KeyboardInterrupt:  # before the first suite began
        if folder is not None:
            _discard(folder)
        raise
    _show(report)
    if result.json_file is not None:
        report.write_json(result.json_file)
    if folder is not None and not report.suites:
        _discard(folder)
    elif folder is not None:
        page = write_files(report, folder)
        stdout.print(f"\nPage: [bold]{page}[/]", highlight=False, soft_wrap=True)
    if report.interrupted is not None:
        sys.exit(130)
    if report.has_failed:
        sys.exit(1)


def _discard(folder: Path) -> None:
    """Remove the folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def _chosen(suites: Sequence[SuiteName] | None, options: BenchOptions) -> list[SuiteName]:
    """Return the suites to run, in their order; refuse options that mean nothing to them."""
    wanted = set(suites or [SuiteName.ALL])
    chosen: list[SuiteName] = [
        each for each in SuiteName if each is not SuiteName.ALL and wanted & {each, SuiteName.ALL}
    ]
    for name in given(options):
        belongs = SUITES_OF.get(name, tuple(SuiteName))
        if not set(belongs) & set(chosen):
            raise typer.BadParameter(f"{flag_of(options, name)} belongs to --suite {' or '.join(belongs)}")
    return chosen


@contextmanager
def _progress(json_file: str | None) -> Iterator[Callable[[float, str], None]]:
    """Show the progress: a bar for people, JSON lines for a program."""
    if json_file == "-":
        yield json_progress(sys.stderr)
    elif json_file is not None:
        with Path(json_file).open("w", encoding="utf-8") as lines:
            yield json_progress(lines)
    else:
        with progress_bar() as bar:
            task = bar.add_task("Measuring", total=1.0)
            yield lambda share, what: bar.update(task, completed=share, description=what)


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


def _show(report: "Report") -> None:
    from neo_desktop.app.bench.page.html import headline, machine_lines
    from neo_desktop.app.bench.page.terminal import render_section

    for line in machine_lines(report):
        stdout.print(line, style="dim", highlight=False, markup=False)
    for section in (suite.section() for suite in report.suites):
        # Of a whole self-test, the terminal shows the figures; what is to be said of them is on the page.
        stdout.print(render_section(section, notes=len(report.suites) == 1), highlight=False)
    if report.model_note:
        stdout.print(f"\n{report.model_note}", style="dim", highlight=False, markup=False)
    for line in headline(report):
        stdout.print(f"\n{line}", style="bold", highlight=False, markup=False)
