"""Command-line options that several commands share, beside those of the engine (`EngineOptions`)."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_MODEL, _ENGINE, _SERVER = "Model", "Engine", "Server"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="A model on this computer: a name from 'neo-desktop models list', the folder of a Hugging Face "
        "checkpoint, or a GGUF file.",
    ),
]
ModelsDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--models-dir",
        metavar="DIR",
        help="A folder of models to choose from; repeatable. Default: the cache of Hugging Face's programs. "
        "Pulled models are always included.",
        rich_help_panel=_MODEL,
    ),
]
ModelAliases = Annotated[
    list[str] | None,
    typer.Option(
        "--model-alias",
        metavar="NAME",
        help="Further name under which requests may ask for the model; * in it stands for any text "
        "('gpt-*'); repeatable. Anthropic's API takes claude-* in any case.",
        rich_help_panel=_MODEL,
    ),
]
IdleUnload = Annotated[
    float,
    typer.Option(
        "--idle-unload",
        metavar="MIN",
        min=0,
        help="Give the model's memory back after this time without a request; the next request loads it "
        "again, and waits. 0: never.",
        rich_help_panel=_MODEL,
    ),
]
EngineInProcess = Annotated[
    bool | None,
    typer.Option(
        "--engine-process/--no-engine-process",
        help="Run the engine in a process of its own, which is started again if it ends: if the GPU is lost, "
        "say. Default: with a GPU.",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
Backend = Annotated[
    Literal["auto", "neo", "llamacpp"],
    typer.Option(
        "--backend",
        help="What computes models: neo-desktop's own engine (neo), or llama.cpp (llamacpp: GGUF files, one "
        "request after the other, no offloading by NEO); auto takes llama.cpp for GGUF files that the engine "
        "cannot run.",
        rich_help_panel=_ENGINE,
    ),
]
Host = Annotated[
    str,
    typer.Option(help="Address to listen on; other addresses than loopback need --api-key."),
]
Port = Annotated[
    int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="NEO_DESKTOP_API_KEY",
        help="Key that clients must send (Authorization: Bearer KEY).",
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
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="Site or app whose pages may use the API: https://chat.example, app://obsidian.md, "
        "http://localhost:* for any port; repeatable.",
        rich_help_panel=_SERVER,
    ),
]
MaxBodyMib = Annotated[
    float,
    typer.Option(
        "--max-body-mib",
        metavar="MIB",
        min=0.001,
        help="The largest body of a request.",
        rich_help_panel=_SERVER,
    ),
]
MaxMessages = Annotated[
    int, typer.Option("--max-messages", min=1, help="The most messages of a chat.", rich_help_panel=_SERVER)
]
MaxQueue = Annotated[
    int,
    typer.Option(
        "--max-queue",
        min=1,
        help="The most answers that wait for their first token; further requests get status 503.",
        rich_help_panel=_SERVER,
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        "--request-timeout",
        metavar="SECONDS",
        min=0.001,
        help="The longest that a request may take, waiting included. Default: any time.",
        rich_help_panel=_SERVER,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]


def in_existing_folder(path: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is computed for it."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, expected the name of a file")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=in_existing_folder, help="Also write the figures to this file."
    ),
]
