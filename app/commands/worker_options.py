"""The options of `worker`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from neo_desktop.engine.options import OPTIONS, Option

_SECRET = OPTIONS["worker_secret"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """An attention worker."""

    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST[:PORT]",
            help="Address to listen on; default: all of this computer's, port 7455. Port 0: any free one.",
            show_default=False,
        ),
    ] = "0.0.0.0"
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="HOST[:PORT]",
            help="Join the cluster of a server with '--workers N', by Ray (port 6379), instead of listening.",
        ),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            metavar="GIB",
            min=0.001,
            help="The most memory for KV, of the device. Default: 80 % of what is free.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="cpu|cuda[:N]",
            help="The memory for KV and the processor: main memory and the CPU, or GPU number N.",
        ),
    ] = "cpu"
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads for attention. Default: one per core.")
    ] = None
    worker_secret: Annotated[Path | None, Option(flag=_SECRET.flag, metavar="FILE", help=_SECRET.help)] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="Certificate of this computer; with it, connections are encrypted.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="The certificate's key, if it is in another file."),
    ] = None
