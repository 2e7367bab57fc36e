"""Command-line options that several commands share, beside those of the engine (`EngineOptions`)."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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
        rich_help_panel="Model",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]


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
