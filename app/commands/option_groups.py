"""The options of `chat` and `serve`: models, engines, and access."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import typer

from neo_desktop.app.commands import options as opt
from neo_desktop.app.engines.limits import DEFAULT_LIMITS, ServerLimits
from neo_desktop.engine.options import BUILTIN, EngineOptions

_model = partial(typer.Option, rich_help_panel="Model")
_engine = partial(typer.Option, rich_help_panel="Engine")
_server = partial(typer.Option, rich_help_panel="Server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Models, engines, where it listens, who may come, and what they may take."""

    model: opt.Model = BUILTIN
    engine: EngineOptions = field(default_factory=EngineOptions)  # for every model; its `model` is ignored
    models_dirs: opt.ModelsDirs = None
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
            "--idle-unload",
            metavar="MIN",
            min=0,
            help="Give the model's memory back after this time without a request; the next request loads it "
            "again, and waits. 0: never.",
        ),
    ] = 0
    engine_process: Annotated[
        bool | None,
        _engine(
            "--engine-process/--no-engine-process",
            help="Run the engine in a process of its own, which is started again if it ends: if the GPU is "
            "lost, say. Default: with a GPU.",
            show_default=False,
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "neo", "llamacpp"],
        _engine(
            "--backend",
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
    max_body_mib: Annotated[
        float,
        _server("--max-body-mib", metavar="MIB", min=0.001, help="The largest body of a request."),
    ] = DEFAULT_LIMITS.max_body_bytes / 2**20
    max_messages: Annotated[int, _server("--max-messages", min=1, help="The most messages of a chat.")] = (
        DEFAULT_LIMITS.max_messages
    )
    max_queue: Annotated[
        int,
        _server(
            "--max-queue",
            min=1,
            help="The most answers that wait for their first token; further requests get status 503.",
        ),
    ] = DEFAULT_LIMITS.max_queued_requests
    request_timeout: Annotated[
        float | None,
        _server(
            "--request-timeout",
            metavar="SECONDS",
            min=0.001,
            help="The longest that a request may take, waiting included. Default: any time.",
        ),
    ] = None

    @property
    def limits(self) -> ServerLimits:
        """Limits of clients."""
        return ServerLimits(
            max_body_bytes=int(self.max_body_mib * 2**20),
            max_messages=self.max_messages,
            max_queued_requests=self.max_queue,
            request_timeout_s=self.request_timeout,
        )
