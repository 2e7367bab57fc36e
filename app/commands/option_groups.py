"""Options that commands have in common, as one value each."""

from dataclasses import dataclass

from neo_desktop.app.commands import options as opt
from neo_desktop.app.web.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, and where it runs."""

    model: opt.Model = opt.DEFAULT_MODEL
    shape: opt.Shape = None
    models_dirs: opt.ModelsDirs = None
    idle_unload: opt.IdleUnload = 0
    policy: opt.PolicyOption = opt.PolicyName.AUTO
    device: opt.DeviceOption = opt.Device.AUTO
    dtype: opt.DtypeOption = opt.Dtype.AUTO
    gpu_cache_tokens: opt.GpuCacheTokens = None
    cpu_cache_tokens: opt.CpuCacheTokens = None
    gpu_memory: opt.GpuMemory = None
    gpu_slice: opt.GpuSlice = None
    cpu_memory: opt.CpuMemory = None
    cpu_cache_dtype: opt.CpuCacheDtypeOption = opt.CpuCacheDtype.AUTO
    engine_process: opt.EngineInProcess = None
    trace_timeline: opt.TraceTimeline = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where it listens, who may come, and what they may take."""

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
    def limits(self) -> Limits:
        """What clients may take."""
        return Limits(
            max_body_bytes=int(self.max_body_mib * 2**20),
            max_messages=self.max_messages,
            max_queued_requests=self.max_queue,
            request_timeout_s=self.request_timeout,
        )
