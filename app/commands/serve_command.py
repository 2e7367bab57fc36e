"""The commands `chat` and `serve`."""

import gc
import os
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack

from rich.markup import escape

from neo_desktop.app.application import create_app
from neo_desktop.app.commands.options import ServerOptions
from neo_desktop.app.commands.terminal import loading_bar, stderr, stdout
from neo_desktop.app.data_folder import data_folder
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.web.server import claim_port, serve, urls
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.options import EngineOptions


def run_server(options: ServerOptions, *, with_page: bool = False, open_browser: bool = False) -> None:
    """Claim the port, load the model, serve until Ctrl-C.

    Without the page, requests are answered once the model is loaded; those that come before wait. The page is
    there at once, and shows how the model is loaded.
    """
    gc.freeze()  # what was imported stays: to look through it for garbage again and again takes 100 ms each
    # First the port: to find it busy after minutes of loading would be a poor joke.
    with claim_port(options.host, options.port) as socket:
        trouble = None if options.engine.device == "cpu" else why_unusable()
        if trouble is not None:
            stdout.print(f"[bold yellow]{escape(trouble)}[/]", highlight=False, soft_wrap=True)
        loader = ModelLoader(
            Catalogue(options.models_dirs, model=options.model, shape=options.engine.shape),
            options.engine,
            request_timeout_s=options.request_timeout,
            process=options.engine_process,
            backend=options.backend,
        )
        name = loader.catalogue.first
        service = None
        if with_page:
            loader.check(loader.catalogue.get(name))
        else:
            with loading_bar("Loading") as progress:
                service = loader(name, progress)
        host = ModelHost(service, load=loader, name=name, idle_unload_s=60 * options.idle_unload or None)
        url, *other_urls = urls(options.host, socket.getsockname()[1])
        web_app = create_app(
            host,
            api_key=options.api_key,
            allowed_hosts=options.allowed_hosts or (),
            allowed_origins=options.allowed_origins or (),
            model_aliases=options.model_aliases or (),
            data_folder=data_folder() if with_page else None,
            loader=loader,
            trouble=trouble,
        )
        if with_page:
            from neo_desktop.ui.page import mount

            mount(web_app)
            _follow(host, lambda: _print_notes(options.engine, loader))

        def announce() -> None:
            if with_page:
                stdout.print(f"Chat:  [bold]{url}[/]", highlight=False)
            stdout.print(f"API:   [bold]{url}/v1[/]  (model {escape(name)})", highlight=False)
            for other in other_urls:
                stdout.print(f"From other devices of your network:  [bold]{other}[/]", highlight=False)
            if service is not None:
                _print_notes(options.engine, loader)
            stdout.print("Ctrl-C ends the program.", highlight=False)
            # Without a screen, Python would open a text browser in this terminal.
            if open_browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                webbrowser.open(url)

        serve(web_app, socket, host.stop, announce)
    stdout.print("Stopped.")


def _follow(host: ModelHost, on_loaded: Callable[[], None]) -> None:
    """Show every load of a host, and why one failed; `on_loaded` is called when the first one succeeds."""
    shown = ExitStack()
    progress: Callable[[float, str], None] | None = None
    has_loaded = False

    def changed() -> None:
        nonlocal progress, has_loaded
        if host.loading is not None:
            progress = progress or shown.enter_context(loading_bar("Loading"))
            progress(host.loading.share, host.loading.what)
        elif progress is not None:
            shown.close()
            progress = None
            if host.error is not None:
                stderr.print(f"[bold red]error:[/] {escape(host.error)}", highlight=False, soft_wrap=True)
            elif host.has_weights and not has_loaded:
                has_loaded = True
                on_loaded()

    host.listeners.append(changed)


def _print_notes(options: EngineOptions, loader: ModelLoader) -> None:
    """Say what the owner of the computer should know of the loaded model."""
    if options.cpu_cache_dtype == "int8":
        stdout.print("CPU-cache in 8 bits: answers may differ slightly.", highlight=False)
    if loader.note is not None:
        stdout.print(loader.note, highlight=False)
