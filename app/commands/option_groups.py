"""The options of `chat` and `serve`: models, engines, and access."""

from dataclasses import dataclass, field

from neo_desktop.app.commands import options as opt
from neo_desktop.app.engines.limits import DEFAULT_LIMITS, ServerLimits
from neo_desktop.engine.options import BUILTIN, EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Models, engines, where it listens, who may come, and what they may take."""

    model: opt.Model = BUILTIN
    engine: EngineOptions = field(
        default_factory=EngineOptions
    )  # for every model; the one that it names is ignored
    models_dirs: opt.ModelsDirs = None
    model_aliases: opt.ModelAliases = None
    idle_unload: opt.IdleUnload = 0
    engine_process: opt.EngineInProcess = None
    backend: opt.Backend = "auto"
    host: opt.Host = opt.DEFAULT_HOST
    port: opt.Port = opt.DEFAULT_PORT
    api_key: opt.ApiKey = None
    allowed_hosts: opt.AllowedHosts = None
    allowed_origins: opt.AllowedOrigins = None
    max_body_mib: opt.MaxBodyMib = DEFAULT_LIMITS.max_body_bytes / 2**20
    max_messages: opt.MaxMessages = DEFAULT_LIMITS.max_messages
    max_queue: opt.MaxQueue = DEFAULT_LIMITS.max_queued_requests
    request_timeout: opt.RequestTimeout = None

    @property
    def limits(self) -> ServerLimits:
        """Limits of clients."""
        return ServerLimits(
            max_body_bytes=int(self.max_body_mib * 2**20),
            max_messages=self.max_messages,
            max_queued_requests=self.max_queue,
            request_timeout_s=self.request_timeout,
        )
