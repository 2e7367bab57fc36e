"""Simulated machines that deviate from the scheduler's tables."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import Curve, TableCostModel
from neo_desktop.engine.predict.estimate import copy_wait_ms, predict, streamed_tokens_of
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.simulator import SimulatedRequest, simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest

Observer = Callable[[Decision[SimulatedRequest], TableCostModel], None]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Deviation of the true machine from the tables; the scheduler learns it only as the engine does."""

    gpu_slowdown: float = 1.0  # true time / table time of the GPU's stages
    cpu_slowdown: float = 1.0  # the same for CPU attention
    noise: float = 0.0  # relative deviation of single iterations (of a log-normal factor with median 1)
    bus_slowdown: float = 1.0  # the same for copies
    overlap_loss: float = 0.0  # time beyond the stages, per ms of attention outside the device
    launch_ms: float = 0.0  # the same, per layer of an iteration with prompts, moves or streamed KV

    def __post_init__(self) -> None:
        slowdowns = self.gpu_slowdown, self.cpu_slowdown, self.bus_slowdown
        if not (all(0 < slowdown < 100 for slowdown in slowdowns) and 0 <= self.noise < 1):
            raise ValueError("a slowdown must be between 0 and 100, noise at least 0 and below 1")
        if not (0 <= self.overlap_loss < 100 and 0 <= self.launch_ms < 100):
            raise ValueError("a loss must be at least 0 and below 100")


class Reality:
    """Gives iterations their true times and corrects the scheduler's cost model accordingly.

    Args:
        tables: the scheduler's initial cost model.
        seed: of the noise.
        observe: called with each decision and the scheduler's cost model at that time.
    """

    def __init__(
        self, tables: TableCostModel, mismatch: Mismatch, seed: int = 0, observe: Observer | None = None
    ) -> None:
        self.believed = CorrectedCostModel.of(tables)  # for the scheduler
        transfer = Curve(tables.transfer.x, [ms * mismatch.bus_slowdown for ms in tables.transfer.ms])
        self.true = CorrectedCostModel.of(replace(tables, transfer=transfer))  # the actual machine
        true = self.true.correction
        true.device, true.host, true.bus = mismatch.gpu_slowdown, mismatch.cpu_slowdown, mismatch.bus_slowdown
        self._mismatch = mismatch
        self._random = random.Random(seed)
        self._observe = observe

    def __call__(self, decision: Decision[SimulatedRequest]) -> IterationTiming:
        """Return the true timing of an iteration, and correct the scheduler's cost model."""
        if self._observe is not None:
            self._observe(decision, self.believed)
        shape, predicted = decision.shape, decision.predicted
        # The shape contains prefill times as the scheduler predicts them.
        factor = self.true.correction.device / self.believed.correction.device
        batches = tuple(each._replace(prefill_ms=each.prefill_ms * factor) for each in shape.batches)
        timing = predict(self.true, shape._replace(batches=batches))
        mismatch = self._mismatch
        noise = self._random.lognormvariate(0.0, mismatch.noise) if mismatch.noise else 1.0
        lost_ms = mismatch.overlap_loss * timing.host_attention_ms
        has_copies = shape.moved_tokens or any(sum(streamed_tokens_of(each)) for each in batches)
        if has_copies or any(each.tokens > each.num_decodes for each in batches):
            lost_ms += mismatch.launch_ms * self.true.num_layers
        total_ms = (timing.total_ms + lost_ms) * noise
        measured = replace(
            timing,
            total_ms=total_ms,
            host_attention_ms=timing.host_attention_ms * noise,
            copies_ms=timing.copies_ms * noise,
            copy_wait_ms=timing.copy_wait_ms * noise,
        )
        self.believed.learn(predicted, measured)  # as the engine does
        return replace(measured, copy_wait_ms=copy_wait_ms(self.true, shape))


def simulate_on(
    mismatch: Mismatch | None,
    requests: Sequence[WorkloadRequest],
    policy: Policy,
    tables: TableCostModel,
    *where: Any,
    seed: int = 0,
    observe: Observer | None = None,
    **others: Any,
) -> SimulationResult:
    """Call `simulate`, for a machine that deviates from the tables; None: it does not."""
    if mismatch is None:
        return simulate(requests, policy, tables, *where, **others)
    reality = Reality(tables, mismatch, seed, observe)
    return simulate(requests, policy, reality.believed, *where, true_timing=reality, **others)
