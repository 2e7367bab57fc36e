"""A machine that is not what the cost tables say: what becomes of decisions on wrong predictions."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, predict


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How the true machine differs from the tables; the scheduler learns of it only as the engine does."""

    gpu_slowdown: float = 1.0  # its stages truly take so many times what the tables say
    cpu_slowdown: float = 1.0  # likewise CPU attention
    noise: float = 0.0  # relative deviation of single iterations (of a log-normal factor with median 1)
    bus_slowdown: float = 1.0  # as the others

    def __post_init__(self) -> None:
        slowdowns = self.gpu_slowdown, self.cpu_slowdown, self.bus_slowdown
        if not (all(0 < slowdown < 100 for slowdown in slowdowns) and 0 <= self.noise < 1):
            raise ValueError("a slowdown must lie between 0 and 100, noise from 0 to below 1")


class Reality:
    """Gives iterations their true times and corrects the scheduler's cost model by them.

    Args:
        tables: what the scheduler first believes.
        seed: of the noise.
    """

    def __init__(self, tables: CostModel, mismatch: Mismatch, seed: int) -> None:
        self.believed = CorrectedCostModel(tables)  # for the scheduler
        self.true = CorrectedCostModel(tables)  # as it is
        self.true.device_factor = mismatch.gpu_slowdown
        self.true.host_factor = mismatch.cpu_slowdown
        self.true.bus_factor = mismatch.bus_slowdown
        self._noise = mismatch.noise
        self._random = random.Random(seed)

    def carry_out(
        self,
        predicted: IterationTiming,
        *shapes: BatchShape,
        moved_tokens: int,
        async_decodes: Mapping[KVTier, Decodes],
    ) -> float:
        """Return how long an iteration truly takes, in ms; the scheduler's beliefs are corrected by it.

        Args:
            predicted: what the scheduler believes.
            loads: of its sub-batches.
            moved_tokens: see `iteration_ms`.
            async_decodes: likewise.
        """
        # The time of prompts is in the loads already, as the scheduler believes it.
        factor = self.true.device_factor / self.believed.device_factor
        truly = [shape._replace(prefill_ms=shape.prefill_ms * factor) for shape in shapes]
        timing = predict(self.true, *truly, moved_tokens=moved_tokens, async_decodes=async_decodes)
        noise = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
        total_ms = timing.total_ms * noise
        measured = replace(
            timing,
            total_ms=total_ms,
            host_attention_ms=timing.host_attention_ms * noise,
            copies_ms=timing.copies_ms * noise,
            copy_wait_ms=timing.copy_wait_ms * noise,
        )
        self.believed.learn(predicted, measured)  # as the engine does
        return total_ms
