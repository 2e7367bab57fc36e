"""Command-line options that several commands share; each default is stated here, once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Where the linear layers run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Number format of weights and KV."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class PolicyName(StrEnum):
    """Where requests may live."""

    AUTO = "auto"
    GPU_ONLY = "gpu-only"


DEFAULT_MODEL = "builtin"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_MODEL, _ENGINE, _SERVER = "Model", "Engine", "Server"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="FOLDER",
        help="A Hugging Face checkpoint on this computer, or 'builtin'.",
        rich_help_panel=_MODEL,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Random weights in a published shape, e.g. llama-2-7b: to measure without a checkpoint.",
        rich_help_panel=_MODEL,
    ),
]
DeviceOption = Annotated[
    Device, typer.Option("--device", help="Where the linear layers run.", rich_help_panel=_ENGINE)
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Number format of weights and KV.", rich_help_panel=_ENGINE)
]
PolicyOption = Annotated[
    PolicyName,
    typer.Option(
        "--policy",
        help="Where requests may live: in GPU memory only, or in both.",
        rich_help_panel=_ENGINE,
    ),
]
GpuCacheTokens = Annotated[
    int | None,
    typer.Option(min=0, help="Size of the GPU-cache in tokens; default: what fits.", rich_help_panel=_ENGINE),
]
CpuCacheTokens = Annotated[
    int | None,
    typer.Option(min=0, help="Size of the CPU-cache in tokens; default: what fits.", rich_help_panel=_ENGINE),
]
Host = Annotated[
    str,
    typer.Option(help="Address to listen on; others than loopback need a key.", rich_help_panel=_SERVER),
]
Port = Annotated[
    int, typer.Option("--port", "-p", min=0, max=65535, help="0: any free one.", rich_help_panel=_SERVER)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="NEO_DESKTOP_API_KEY",
        help="Key that clients must send (Authorization: Bearer KEY).",
        rich_help_panel=_SERVER,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        help="Further host name under which browsers may reach the server; repeatable.",
        rich_help_panel=_SERVER,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")
]
