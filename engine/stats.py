"""Statistics of a running engine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.kv.disk import DiskCounters
from neo_desktop.engine.kv_tier import KVTier

NEO, LLAMACPP = "neo", "llamacpp"  # backends: the engine of this project, and llama.cpp


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of speculation since the engine's start."""

    num_drafts: int = 0  # verified drafts
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    mean_width: float = 0.0  # tokens per draft
    gain: float = 1.0  # time without drafts, as predicted, over measured time, in iterations with drafts
    model_s: float = 0.0  # time in which a model drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters run from the engine's start."""

    model: str
    policy: str
    device: str
    dtype: str
    gpu_sms: int | None = None  # multiprocessors used by the model; None without a GPU
    max_context_tokens: int
    block_size: int  # tokens per KV block
    num_running: int  # requests with KV
    num_running_at: Mapping[KVTier, int]  # the same by KV tier
    num_waiting: int  # requests without KV
    num_iterations: int
    num_prompt_tokens: int  # computed or reused
    num_cached_tokens: int  # reused from earlier requests with the same prefix
    num_output_tokens: int
    num_preemptions: int = 0  # requests whose KV was freed and recomputed
    num_moves: int = 0  # moves of a request's KV to another tier;
    num_cpu_decodes: int = 0  # output tokens whose attention the CPU computed
    num_async_decodes: int = 0  # the async decodes among them
    num_double_iterations: int = 0  # iterations with two sub-batches
    outside_s: float = 0.0  # between iterations, in which only drafts are computed
    pools: Mapping[KVTier, PoolUsage]
    disk: DiskCounters = DiskCounters()  # noqa: RUF009
    speculative: SpeculationStats | None = None  # None: no speculation
    backend: str = NEO

    def to_json(self) -> dict[str, Any]:
        """Return plain data; tiers appear by name."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["num_running_at"] = {tier.name: count for tier, count in self.num_running_at.items()}
        data["speculative"] = self.speculative and asdict(self.speculative)
        data["pools"] = {tier.name: asdict(usage) for tier, usage in self.pools.items()}
        data["disk"] = self.disk._asdict()
        return data
