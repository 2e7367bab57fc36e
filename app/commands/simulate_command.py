"""The command `neo-desktop simulate`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.flags import with_flags
from neo_desktop.app.commands.terminal import progress_bar, set_up_logging, stdout

EXAMPLES = """Examples:

neo-desktop simulate --gpu rtx-3060

neo-desktop simulate --gpu t4 --model llama-2-7b --input 400 --output 50 --requests 500

neo-desktop simulate --gpu rtx-4090 --cpu-memory 128 --model llama-3.1-70b:Q4_K_M --json report.json
"""

_MACHINE, _WORKLOAD = "Machine", "Workload"


class UsageError(ValueError):
    """Options that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """A machine, a model, a workload; None: not given."""

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A card: rtx-3060, t4, ...; --list shows all.", rich_help_panel=_MACHINE
        ),
    ] = None
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory", metavar="GIB", min=0.1, help="Instead of the card's.", rich_help_panel=_MACHINE
        ),
    ] = None
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A host: ddr4-desktop, ddr5-laptop, ...; --list shows all. Default: one that fits the GPU.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    cpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--cpu-memory", metavar="GIB", min=0.1, help="Instead of the host's.", rich_help_panel=_MACHINE
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="SHAPE",
            help="A published shape (--list), also quantised (llama-3.1-70b:Q4_K_M), a model folder or a "
            "GGUF file. Default: the largest of some well-known ones that leaves room in the GPU's memory.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    input_tokens: Annotated[
        int,
        typer.Option("--input", min=1, help="Prompts of 0.9 to 1.1 of this.", rich_help_panel=_WORKLOAD),
    ] = 1000  # as a chat: the Azure conversation trace has 1,155 tokens in and 211 out
    output_tokens: Annotated[
        int,
        typer.Option("--output", min=1, help="Answers of 0.9 to 1.1 of this.", rich_help_panel=_WORKLOAD),
    ] = 200
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="How many.", rich_help_panel=_WORKLOAD)
    ] = 100
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Poisson arrivals of so many requests per second. Default: all at once.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this one. Default: all.", rich_help_panel="Engine"),
    ] = None


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
    set_up_logging(debug)
    if show_list:
        from neo_desktop.app.simulate.catalogue import print_catalogue

        print_catalogue(stdout)
        return
    from neo_desktop.app.simulate.run import run_simulation

    try:
        with progress_bar() as progress:
            task = progress.add_task("Simulating", total=1.0)
            report = run_simulation(
                options, lambda share, what: progress.update(task, completed=share, description=what)
            )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if json_file is not None:
        report.write_json(json_file)
    report.print(stdout)
