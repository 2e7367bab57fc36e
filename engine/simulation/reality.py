"""A machine that is not what the cost tables say: what becomes of decisions on wrong predictions."""

import random
from dataclasses import dataclass, replace

from neo_desktop.engine.batch import IterationPlan, IterationTiming, SubBatch
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import Load, costs_of, iteration_ms


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How the true machine differs from the tables; the scheduler learns of it only as the engine does."""

    gpu_slowdown: float = 1.0  # its stages truly take so many times what the tables say
    cpu_slowdown: float = 1.0  # likewise CPU attention
    noise: float = 0.0  # relative deviation of single iterations (of a log-normal factor with median 1)

    def __post_init__(self) -> None:
        if not (0 < self.gpu_slowdown < 100 and 0 < self.cpu_slowdown < 100 and 0 <= self.noise < 1):
            raise ValueError("a slowdown must lie between 0 and 100, noise from 0 to below 1")


class Reality:
    """Gives iterations their true times and corrects the scheduler's cost model by them.

    Args:
        tables: what the scheduler first believes.
        seed: of the noise.
    """

    def __init__(self, tables: CostModel, mismatch: Mismatch, seed: int) -> None:
        self.believed = CorrectedCostModel(tables)  # for the scheduler
        self._true = CorrectedCostModel(tables)
        for kind in (self._true, self._true.in_graphs):
            kind.device_factor = mismatch.gpu_slowdown
            kind.cpu_factor = mismatch.cpu_slowdown
        self._noise = mismatch.noise
        self._random = random.Random(seed)

    def carry_out(self, load: Load, other: Load | None, swapped_tokens: int) -> IterationTiming:
        """Return how long an iteration truly takes that the scheduler has just planned."""
        true = self._true
        # The time of prompts is in the load already, as the scheduler believes it.
        prefill_ms = load.prefill_ms / self.believed.device_factor * true.device_factor
        load = replace(load, prefill_ms=prefill_ms)
        true_kind = costs_of(true, load, other, swapped_tokens)
        factor = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
        attention_ms = sum(
            true_kind.cpu_attention_ms(part.cpu_requests, part.cpu_context_tokens)
            for part in (load, other)
            if part
        )
        return IterationTiming(
            total_ms=iteration_ms(true, load, other, swapped_tokens) * factor,
            cpu_attention_ms=attention_ms * true.num_layers * factor,
            is_graph=true_kind is not true,
        )

    def learn(
        self, predicted_ms: float, predicted_cpu_ms: float, is_graph: bool, timing: IterationTiming
    ) -> None:
        """Correct what the scheduler believes, as the engine does after each iteration."""
        plan = IterationPlan((SubBatch(()),), (), predicted_ms, predicted_cpu_ms, is_graph)
        self.believed.learn(plan, timing)
