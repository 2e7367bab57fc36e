"""The command line: `neo-desktop [chat] | serve | worker | bench | models | doctor | ..`."""

import os
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape
from typer.core import TyperGroup

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.bench_command import EXAMPLES, bench
from neo_desktop.app.commands.flags import Without, with_flags
from neo_desktop.app.commands.models_command import models
from neo_desktop.app.commands.options import ServerOptions, WorkerOptions
from neo_desktop.app.commands.terminal import loading_bar, print_rows, stderr, stdout
from neo_desktop.app.simulate.options import SimulationOptions
from neo_desktop.app.words import error_text
from neo_desktop.engine.options import BUILTIN, OPTIONS, EngineOptions

DEFAULT_COMMAND = "chat"
SIMULATE_EXAMPLES = """Examples:

neo-desktop simulate --gpu rtx-3060

neo-desktop simulate --gpu t4 --model llama-2-7b --input 400 --output 50 --requests 500

neo-desktop simulate --gpu rtx-4090 --cpu-memory 128 --model llama-3.1-70b:Q4_K_M --json report.json
"""
_OF_MEASURE = (  # what the tables depend on, and no check
    "gpu_cache_tokens",
    "cpu_cache_tokens",
    "swap_cache_tokens",
    "gpu_memory_gib",
    "gpu_weights_gib",
    "cpu_memory_gib",
    "cpu_cache_dtype",
)
_UNITS = {
    "GIB": "GiB",
    "MIB": "MiB",
    "MIN": "minutes",
    "SECONDS": "seconds",
    "S": "seconds",
    "MS": "ms",
    "SMS": "multiprocessors",
}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "finite": "a finite number"}


class Program(TyperGroup):
    """The commands; wrong values of their options are explained in sentences instead of pydantic's."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = _explained(error.__cause__, error.param)
            raise


def _explained(error: ValidationError, param: Any) -> str:
    first = error.errors(include_url=False)[0]
    kind, given = first["type"], first["input"]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        unit = _unit(param)
        return f"{given} is out of range: give {words} {first['ctx'][key]:g}{f' {unit}' if unit else ''}"
    wanted = _KINDS.get(kind.partition("_")[0])
    if wanted is not None:
        return f"{given!r} is not {wanted}"
    return first["msg"].removeprefix("Value error, ").rstrip(".")


def _unit(param: Any) -> str:
    names = f"{param.name} {' '.join(param.opts)}"
    if "tokens" in names:
        return "tokens"
    return "requests per second" if "--rate" in names else _UNITS.get(param.metavar or "", "")


app = typer.Typer(
    name="neo-desktop",
    cls=Program,
    help="Run large language models beyond what your GPU's memory should allow, at full accuracy.",
    epilog="Without a command, the chat opens in your browser.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line: exit code 0 for success, 1 for failure, 2 for wrong use."""
    arguments = with_command(sys.argv[1:])
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `neo-desktop info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would complain at its end
        sys.exit(1)
    except ModuleNotFoundError:
        raise  # of an extra: `entry` says which
    except Exception as error:
        if "--debug" in arguments:
            raise
        stderr.print(f"[bold red]error:[/] {escape(error_text(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


def with_command(arguments: list[str]) -> list[str]:
    """Put the default command before options: `--port 9000` means `chat --port 9000`."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "-h", "--version")):
        return [DEFAULT_COMMAND, *arguments]
    return arguments


def _print_version(wanted: bool) -> None:
    if wanted:
        from neo_desktop import __version__

        stdout.print(f"neo-desktop {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


@app.command(epilog="Example: neo-desktop chat --model ~/models/Llama-3.2-1B-Instruct")
@with_flags
def chat(
    options: ServerOptions,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the default browser.")
    ] = True,
    debug: opt.Debug = False,
) -> None:
    """Open the chat in a browser; the same port serves the OpenAI-compatible API."""
    from neo_desktop.app.commands.serve_command import run_server

    run_server(options, with_page=True, open_browser=browser)


@app.command(epilog="Example: neo-desktop serve --model ~/models/Qwen3-8B --port 9000")
@with_flags
def serve(options: ServerOptions, debug: opt.Debug = False) -> None:
    """Serve the OpenAI-compatible API without the page."""
    from neo_desktop.app.commands.serve_command import run_server

    run_server(options)


@app.command(epilog="Example: neo-desktop info --json machine.json")
def info(json_file: opt.JsonFile = None, debug: opt.Debug = False) -> None:
    """Show this computer's hardware, the versions in use and where things are."""
    from neo_desktop.app.commands.machine_table import machine_rows
    from neo_desktop.engine.profiling.hardware import machine_info

    machine = machine_info()
    print_rows(machine_rows(machine))
    opt.write_json(json_file, asdict(machine))


@app.command(epilog="Example: neo-desktop worker --memory 24")
@with_flags
def worker(options: WorkerOptions, debug: opt.Debug = False) -> None:
    """Hold KV of another computer's chats, and attend to it: an attention worker, for 'serve --workers'."""
    from neo_desktop.app.commands.worker_command import run_worker

    run_worker(options)


app.command(name="bench", epilog=EXAMPLES)(bench)
app.add_typer(models, name="models")


@app.command(epilog="Example: neo-desktop doctor --json doctor.json")
@with_flags
def doctor(
    *,
    model: opt.Model = BUILTIN,
    engine: Annotated[
        EngineOptions,
        Without(
            "policy",
            "tensor_parallel",
            "trace_timeline",
            "host_reserve_gib",
            "disk_cache_gib",
            "workers",
            "worker_secret",
            "worker_timeout_s",
        ),
    ],
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure how long the parts of an iteration take, unless that is known; --json shows it.",
        ),
    ] = False,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Check or measure again, even if results are there.",
        ),
    ] = False,
    json_file: opt.JsonFile = None,
    debug: opt.Debug = False,
) -> None:
    """Check everything that a model needs of this computer, and say what serves where something fails."""
    from neo_desktop.app.commands.doctor_command import run_doctor, run_measure
    from neo_desktop.app.shelf.catalogue import with_model
    from neo_desktop.engine.doctor.trials import Subject

    if measure:
        with loading_bar("Loading weights") as progress:
            said, tables = run_measure(with_model(engine, model), progress, refresh=refresh)
        stdout.print(said, highlight=False, soft_wrap=True, markup=False)
        opt.write_json(json_file, tables)
        return
    for name in _OF_MEASURE:
        if getattr(engine, name) != getattr(EngineOptions(), name):
            raise typer.BadParameter(f"{OPTIONS[name].flag} belongs to --measure")
    subject = Subject.of(with_model(engine, model))
    with stderr.status("Starting the checks") as status:
        report = run_doctor(subject, refresh=refresh, progress=lambda what: status.update(escape(what)))
    report.print(stdout)
    opt.write_json(json_file, report.to_json() if json_file is not None else None)
    if not report.is_well:
        raise typer.Exit(1)


@app.command(epilog=SIMULATE_EXAMPLES)
@with_flags
def simulate(
    options: SimulationOptions,
    json_file: opt.JsonFile = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show the GPUs, hosts and models that can be named.")
    ] = False,
    debug: opt.Debug = False,
) -> None:
    """Run a workload on a virtual clock: what each policy would bring on a machine that you need not own."""
    if show_list:
        from neo_desktop.app.simulate.machine import PUBLISHED
        from neo_desktop.engine.simulation.presets import GPUS, HOSTS

        for flag, names in (("--gpu", list(GPUS)), ("--cpu", list(HOSTS)), ("--model", list(PUBLISHED))):
            stdout.print(f"[bold]{flag}[/]: {', '.join(names)}", highlight=False)
        return
    from neo_desktop.app.simulate.run import run_simulation

    with loading_bar("Simulating") as progress:
        report = run_simulation(options, progress)
    opt.write_json(json_file, report.to_json())
    report.print(stdout)
