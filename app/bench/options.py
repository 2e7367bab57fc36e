"""The options of the self-test. Nothing heavy is imported: `neo-desktop --help` must not wait for torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from neo_desktop.engine.options import EngineOptions

KIB, GIB = 1 << 10, 1 << 30
_requests = partial(typer.Option, rich_help_panel="Suites throughput and load")


class Suite(StrEnum):
    """A part of the self-test, in the order in which they run."""

    HARDWARE = "hardware"
    THROUGHPUT = "throughput"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The measurements of the suite hardware, their memory and their time."""

    seconds: float = 15.0  # for all repetitions together; each measurement is made three times at least
    threads: tuple[int, ...] = ()  # of host measurements; empty: 1, 2, 4, ... and all usable cores
    memory_bytes: int | None = None  # read on the host; None: beyond its caches
    cpu_matrix_size: int = 2048  # rows and columns
    gpu_memory_bytes: int = GIB  # read on the GPU, within a quarter of what is free
    gpu_matrix_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    transfer_bytes: tuple[int, ...] = tuple(4 * KIB * 4**i for i in range(8))  # 4 KiB to 64 MiB
    offload_bytes: tuple[int, ...] = (16 * KIB, 512 * KIB)  # about what 1 and 32 requests hand over


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(EngineOptions):
    """The engine, the requests that it gets, and what each suite measures; plain fields have no flag."""

    policies: Annotated[
        list[str] | None,
        _requests(
            "--policy",
            metavar="NAME",
            help="Policies to compare; repeatable. Default: gpu-only and auto, where they differ.",
        ),
    ] = None
    input_tokens: Annotated[
        int | None, _requests("--input", min=1, help="Tokens of prompts, within 10 %.")
    ] = None
    output_tokens: Annotated[
        int | None, _requests("--output", min=1, help="Tokens of answers, within 10 %.")
    ] = None
    num_requests: Annotated[
        int | None,
        _requests("--requests", min=1, help="Number of requests. Default: as many as the time allows."),
    ] = None
    repeats: Annotated[int, _requests(min=1, help="Timed runs of each policy in the suite throughput.")] = 3
    seconds: float | None = None  # per suite, if the number of requests is free; None: its own
    drain_seconds: float | None = None  # for open requests at the end; None: enough for five in a row
    hardware: HardwareOptions = field(default_factory=HardwareOptions)
