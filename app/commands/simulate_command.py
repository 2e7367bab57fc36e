"""The command `neo-desktop simulate`."""

from typing import Annotated

import typer

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.flags import with_flags
from neo_desktop.app.commands.terminal import loading_bar, stdout
from neo_desktop.app.simulate.options import SimulationOptions

EXAMPLES = """Examples:

neo-desktop simulate --gpu rtx-3060

neo-desktop simulate --gpu t4 --model llama-2-7b --input 400 --output 50 --requests 500

neo-desktop simulate --gpu rtx-4090 --cpu-memory 128 --model llama-3.1-70b:Q4_K_M --json report.json
"""


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
