"""Options of several commands, and those of `chat`, `serve` and `worker`, beside those of the engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from neo_desktop.app.commands.terminal import set_up_logging
from neo_desktop.engine.options import BUILTIN, OPTIONS, EngineOptions, Option


@contextmanager
def _blaming(flag: str) -> Iterator[None]:
    """Let a ValueError name the option that is wrong."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None


def _existing_folders(paths: list[Path] | None) -> list[Path] | None:
    """Refuse folders of models that do not exist: their models would only be missing."""
    for path in paths or ():
        if not path.expanduser().is_dir():
            raise typer.BadParameter(f"there is no folder {path}")
    return paths


_model = partial(typer.Option, rich_help_panel="Model")
_engine = partial(typer.Option, rich_help_panel="Engine")
_server = partial(typer.Option, rich_help_panel="Server")
_SECRET = OPTIONS["worker_secret"]

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
        callback=_existing_folders,
        help="A folder of models to choose from; repeatable. Default: the cache of Hugging Face's programs. "
        "Pulled models are always included.",
        rich_help_panel="Model",
    ),
]
Debug = Annotated[  # the command itself has nothing to do with it
    bool,
    typer.Option("--debug", callback=set_up_logging, help="Show tracebacks and debug messages."),
]


def _in_existing_folder(path: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is computed for it."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, expected the name of a file")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=_in_existing_folder, help="Also write the figures to this file."
    ),
]


def write_json(file: Path | None, data: Any) -> None:
    """Write the figures where `--json` was given."""
    if file is not None:
        file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Models, engines, where it listens, who may come, and what they may take."""

    model: Model = BUILTIN
    engine: EngineOptions = field(default_factory=EngineOptions)  # for every model; its `model` is ignored
    models_dirs: ModelsDirs = None
    model_aliases: Annotated[
        list[str] | None,
        _model(
            "--model-alias",
            metavar="NAME",
            help="Further name under which requests may ask for the model; * in it stands for any text "
            "('gpt-*'); repeatable. Anthropic's API takes claude-* in any case.",
        ),
    ] = None
    idle_unload: Annotated[
        float,
        _model(
            metavar="MIN",
            min=0,
            help="Give the model's memory back after this time without a request; the next request loads it "
            "again, and waits. 0: never.",
        ),
    ] = 0
    engine_process: Annotated[
        bool | None,
        _engine(
            help="Run the engine in a process of its own, which is started again if it ends: if the GPU is "
            "lost, say. Default: with a GPU.",
            show_default=False,
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "neo", "llamacpp"],
        _engine(
            help="What computes models: neo-desktop's own engine (neo), or llama.cpp (llamacpp: GGUF files, "
            "one request after the other, no offloading by NEO); auto takes llama.cpp for GGUF files that "
            "the engine cannot run.",
        ),
    ] = "auto"
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; other addresses than loopback need --api-key."),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="NEO_DESKTOP_API_KEY",
            help="Key that clients must send (Authorization: Bearer KEY).",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _server(
            "--allowed-host", help="Further host name under which browsers may reach the server; repeatable."
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _server(
            "--allow-origin",
            metavar="ORIGIN",
            help="Site or app whose pages may use the API: https://chat.example, app://obsidian.md, "
            "http://localhost:* for any port; repeatable.",
        ),
    ] = None
    request_timeout: Annotated[
        float | None,
        _server(
            metavar="SECONDS",
            min=0.001,
            help="The longest that a request may take, waiting included. Default: any time.",
        ),
    ] = None

    def __post_init__(self) -> None:
        from neo_desktop.app.web.security import check_bind, check_origin  # noqa: PLC0415 - after --help

        with _blaming("--host"):
            check_bind(self.host, self.api_key)
        with _blaming("--allow-origin"):
            for origin in self.allowed_origins or ():
                check_origin(origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Address to listen on; default: all of this computer's, port 7455. Port 0: any free one.",
            show_default=False,
        ),
    ] = "0.0.0.0"
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Join the cluster of a server with '--workers N', by Ray (port 6379), instead of listening.",
        ),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=0.001,
            help="The most memory for KV, of the device. Default: 80 % of what is free.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda[:N]",
            help="The memory for KV and the processor: main memory and the CPU, or GPU number N.",
        ),
    ] = "cpu"
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for attention. Default: one per core.")
    ] = None
    worker_secret: Annotated[Path | None, Option(flag=_SECRET.flag, metavar="FILE", help=_SECRET.help)] = None
