"""The options of `neo-desktop simulate`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

_machine = partial(typer.Option, rich_help_panel="Machine")
_workload = partial(typer.Option, rich_help_panel="Workload")


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """A machine, a model, a workload; None: not given."""

    gpu: Annotated[
        str | None,
        _machine(metavar="NAME", help="A card: rtx-3060, t4, ...; --list shows all."),
    ] = None
    gpu_memory_gib: Annotated[
        float | None,
        _machine("--gpu-memory", metavar="GIB", min=0.1, help="Memory of the GPU. Default: the card's."),
    ] = None
    cpu: Annotated[
        str | None,
        _machine(
            metavar="NAME",
            help="A host: ddr4-desktop, ddr5-laptop, ...; --list shows all. Default: one that fits the GPU.",
        ),
    ] = None
    cpu_memory_gib: Annotated[
        float | None,
        _machine("--cpu-memory", metavar="GIB", min=0.1, help="Memory of the host. Default: the host's own."),
    ] = None
    model: Annotated[
        str | None,
        _machine(
            "--model",
            "-m",
            metavar="SHAPE",
            help="A published shape (--list), also quantised (llama-3.1-70b:Q4_K_M), a model folder or a "
            "GGUF file. Default: the largest of some well-known ones that leaves room in the GPU's memory.",
        ),
    ] = None
    input_tokens: Annotated[
        int,
        _workload("--input", min=1, help="Tokens of prompts, within 10 %."),
    ] = 1000  # as a chat: the Azure conversation trace has 1,155 tokens in and 211 out
    output_tokens: Annotated[
        int,
        _workload("--output", min=1, help="Tokens of answers, within 10 %."),
    ] = 200
    num_requests: Annotated[int, _workload("--requests", min=1, help="Number of requests.")] = 100
    rate: Annotated[
        float | None,
        _workload(min=0.001, help="Requests per second, as a Poisson process. Default: all at once."),
    ] = None
    acceptance: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help="Verify drafts, each token of which is right with this probability; 0: no drafts.",
            rich_help_panel="Engine",
        ),
    ] = 0.0
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Simulate this policy alone. Default: all.", rich_help_panel="Engine"
        ),
    ] = None
