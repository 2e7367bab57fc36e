"""Figures about a running engine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.kv_tier import KVTier

NEO, LLAMACPP = "neo", "llamacpp"  # backends: the engine of this project, and llama.cpp


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counters run since the engine was made."""

    model: str
    policy: str
    device: str
    dtype: str
    gpu_sms: int | None  # multiprocessors that the model runs on; None without a GPU
    max_context_tokens: int
    block_size: int  # tokens per KV block
    num_running: int  # requests that own KV
    num_running_at: Mapping[KVTier, int]  # of them, by where it lives
    num_waiting: int  # requests that wait for it
    num_iterations: int
    num_prompt_tokens: int  # computed or reused
    num_cached_tokens: int  # reused from earlier requests with the same beginning
    num_output_tokens: int
    num_preemptions: int  # requests whose KV had to be given up and computed again
    num_moves: int  # requests whose KV was brought to another tier
    num_cpu_decodes: int  # output tokens whose attention the CPU computed
    num_async_decodes: int  # those of them that went through the layers at their own pace
    num_double_iterations: int  # iterations with two sub-batches
    outside_s: float  # between one iteration's end and the next one's start, when nothing is computed
    pools: Mapping[KVTier, PoolUsage]
    backend: str = NEO

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with tiers by their names."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["num_running_at"] = {tier.name: count for tier, count in self.num_running_at.items()}
        data["pools"] = {tier.name: asdict(usage) for tier, usage in self.pools.items()}
        return data
