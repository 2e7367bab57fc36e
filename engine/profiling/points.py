"""Measuring points: the stages of an iteration, and a stage at one size."""

from dataclasses import dataclass
from enum import StrEnum

from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier

# the tier whose KV prompts attend to fastest
NEAR = next(tier for tier in MEASURED_TIERS if not tier.host_attends)


class Stage(StrEnum):
    """A part of an iteration, named like its table in `TableCostModel`."""

    LINEAR = "linear"  # x: tokens
    HEAD = "head"  # x: rows
    OFFLOAD = "offload"  # x: requests
    TRANSFER = "transfer"  # x: tokens
    SWAP = "swap"  # x: tokens
    FIRST_CHUNK_ATTENTION = "first_chunk_attention"  # of a prompt; x: tokens, y: the same
    LATER_CHUNK_ATTENTION = "later_chunk_attention"  # x: tokens, y: context at its end, more than x
    GPU_ATTENTION = "gpu_attention"  # x: requests, y: mean context
    CPU_ATTENTION = "cpu_attention"  # x: requests, y: mean context

    @property
    def tier(self) -> KVTier | None:
        """KV tier of decode attention; None: another stage."""
        label = self.value.removesuffix("_attention")
        return next((tier for tier in MEASURED_TIERS if tier.label == label), None)

    @property
    def is_attention(self) -> bool:
        """True if the time depends on the layer's sliding window."""
        return self.is_prefill or self.tier is not None

    @property
    def is_prefill(self) -> bool:
        """True if this is a prompt chunk's attention."""
        return self in (Stage.FIRST_CHUNK_ATTENTION, Stage.LATER_CHUNK_ATTENTION)


@dataclass(frozen=True, slots=True)
class Point:
    """A stage at one size; `Stage` defines x and y."""

    stage: Stage
    x: int
    y: int = 1

    @property
    def work(self) -> int:
        """A measure roughly proportional to the time of large points."""
        return self.x * self.y
