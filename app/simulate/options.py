"""The options of `neo-desktop simulate`."""

from dataclasses import dataclass
from typing import Annotated

import typer

_MACHINE, _WORKLOAD = "Machine", "Workload"


class UsageError(ValueError):
    """A wrong value of an option.

    Args:
        option: its flag.
        message: what to do.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


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
            "--gpu-memory",
            metavar="GIB",
            min=0.1,
            help="Memory of the GPU. Default: the card's.",
            rich_help_panel=_MACHINE,
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
            "--cpu-memory",
            metavar="GIB",
            min=0.1,
            help="Memory of the host. Default: the host's own.",
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
            "GGUF file. Default: the largest of some well-known ones that leaves room in the GPU's memory.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    input_tokens: Annotated[
        int,
        typer.Option("--input", min=1, help="Tokens of prompts, within 10 %.", rich_help_panel=_WORKLOAD),
    ] = 1000  # as a chat: the Azure conversation trace has 1,155 tokens in and 211 out
    output_tokens: Annotated[
        int,
        typer.Option("--output", min=1, help="Tokens of answers, within 10 %.", rich_help_panel=_WORKLOAD),
    ] = 200
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="Number of requests.", rich_help_panel=_WORKLOAD)
    ] = 100
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Requests per second, as a Poisson process. Default: all at once.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Simulate this policy alone. Default: all.", rich_help_panel="Engine"
        ),
    ] = None
