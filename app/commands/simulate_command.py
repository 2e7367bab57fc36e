"""The command `neo-desktop simulate`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.flags import with_flags
from neo_desktop.app.commands.terminal import progress_bar, set_up_logging, stdout
from neo_desktop.engine.options import MAX_BATCH_TOKENS, MAX_TOKEN_MS, OPTIONS

EXAMPLES = """Examples:

neo-desktop simulate --gpu rtx-3060

neo-desktop simulate --gpu t4 --model llama-2-7b --trace osc.json --rate 2 --json report.json

neo-desktop simulate --gpu-memory 16 --gpu-bandwidth 450 --gpu-tflops 40 --cpu ddr5-desktop

neo-desktop simulate --gpu a10g --workers 4 --worker-bandwidth 100 --link 25 --gpu-price 1 --worker-price 0.2

neo-desktop simulate --tables tables.json --gpu-cache-tokens 3000 --cpu-cache-tokens 60000 --trace conv.csv
"""

_MACHINE, _WORKERS, _WORKLOAD, _ENGINE = "Machine", "Attention workers", "Workload", "Engine"


class SimulatedDtype(StrEnum):
    """Number format of weights and KV on the simulated GPU."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class UsageError(ValueError):
    """Options that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """A machine, a model, a workload, policies; None: not given."""

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A card: rtx-3060, t4, ...; --list shows all.", rich_help_panel=_MACHINE
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
    gpu_json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help='Your own figures: {"memory_gib": 12, "bandwidth_gb_per_s": 360, "tflops": 25.5}; also '
            "pcie_gb_per_s, bfloat16, name.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            metavar="GIB",
            help="Your own figure, alone or instead of --gpu's.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    gpu_bandwidth_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--gpu-bandwidth", metavar="GB/S", help="Likewise: of its memory.", rich_help_panel=_MACHINE
        ),
    ] = None
    gpu_tflops: Annotated[
        float | None,
        typer.Option(metavar="TFLOPS", help="Likewise: dense fp16 with fp32 sums.", rich_help_panel=_MACHINE),
    ] = None
    cpu_memory_gib: Annotated[
        float | None,
        typer.Option("--cpu-memory", metavar="GIB", help="Likewise: main memory.", rich_help_panel=_MACHINE),
    ] = None
    cpu_bandwidth_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--cpu-bandwidth",
            metavar="GB/S",
            help="Likewise: of main memory; two modules of DDR4-3200 have 51, of DDR5-5600 90.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    cpu_cores: Annotated[
        int | None,
        typer.Option(metavar="N", help="Likewise: physical cores.", rich_help_panel=_MACHINE),
    ] = None
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="Measured cost tables instead of a datasheet: what 'doctor --measure --json' wrote.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="SHAPE",
            help="A published shape (--list), also quantised (llama-3.1-70b:Q4_K_M), a model folder or a "
            "GGUF file. Default: the largest of some well-known ones that leaves room in the GPU's memory; "
            "llama-2-7b with --tables.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    dtype: Annotated[
        SimulatedDtype,
        typer.Option(
            help="Number format of weights and KV. Default: the model's own, float16 where the GPU has no "
            "bfloat16.",
            rich_help_panel=_MACHINE,
        ),
    ] = SimulatedDtype.AUTO
    gpu_slowdown: Annotated[
        float,
        typer.Option(help="GPU stages truly take so many times what is predicted.", rich_help_panel=_MACHINE),
    ] = 1.0
    cpu_slowdown: Annotated[
        float,
        typer.Option(
            help="CPU attention truly takes so many times what is predicted.", rich_help_panel=_MACHINE
        ),
    ] = 1.0
    noise: Annotated[
        float,
        typer.Option(help="Relative deviation of single iterations, e.g. 0.1.", rich_help_panel=_MACHINE),
    ] = 0.0
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1024,
            help="Attention workers: other computers that attend in place of this machine's CPU. Default: as "
            "many as the GPU wants.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    worker_bandwidth_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--worker-bandwidth",
            metavar="GB/S",
            help="There are workers, whose memory has this bandwidth each.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    worker_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--worker-memory",
            metavar="GIB",
            help="Memory that each gives to KV. Default: 64.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    link_gbit_per_s: Annotated[
        float | None,
        typer.Option(
            "--link",
            metavar="GBIT/S",
            help="Network between the GPU's machine and all workers. Default: 10.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    latency_us: Annotated[
        float | None,
        typer.Option(
            "--latency",
            metavar="US",
            help="Its round trip, as 'ping' shows it. Default: 100.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    gpu_price: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE",
            help="Of an hour of the GPU's machine, in any currency: shows tokens per cost.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    worker_price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Likewise of each worker.", rich_help_panel=_WORKERS),
    ] = None
    trace: opt.Trace = None
    input_tokens: Annotated[
        int | None,
        typer.Option(
            "--input",
            min=1,
            help="Synthetic prompts of 0.9 to 1.1 of this. Default: 1000, as in a chat.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output",
            min=1,
            help="Synthetic answers of 0.9 to 1.1 of this. Default: 200, as in a chat.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help="The first so many of the trace; synthetic ones, 100 unless given.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            help="Poisson arrivals of so many requests per second instead; inf: all at once.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    seed: opt.Seed = 0
    max_context_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Refuse longer requests under every policy alike.", rich_help_panel=_WORKLOAD
        ),
    ] = None
    gpu_weights_gib: Annotated[float | None, OPTIONS["gpu_weights_gib"]] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only this one: gpu-only, fastdecode, neo, apex or auto; default: all.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    gpu_cache_tokens: Annotated[int | None, OPTIONS["gpu_cache_tokens"]] = None
    cpu_cache_tokens: Annotated[int | None, OPTIONS["cpu_cache_tokens"]] = None
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an iteration at most.", rich_help_panel=_ENGINE)
    ] = MAX_BATCH_TOKENS["cuda"]
    max_batch_requests: Annotated[
        int | None, typer.Option(min=1, help=OPTIONS["max_batch_requests"].help, rich_help_panel=_ENGINE)
    ] = None
    max_token_ms: Annotated[
        float,
        typer.Option(min=0, metavar="MS", help=OPTIONS["max_token_ms"].help, rich_help_panel=_ENGINE),
    ] = MAX_TOKEN_MS


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
    from neo_desktop.app.simulate import run_simulation

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
