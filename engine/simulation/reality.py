"""A machine that differs from its cost tables, to test decisions on wrong predictions."""

import random
from dataclasses import dataclass, replace

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import IterationShape, predict


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Deviation of the true machine from the tables; the scheduler learns it only as the engine does."""

    gpu_slowdown: float = 1.0  # true time / table time of the GPU's stages
    cpu_slowdown: float = 1.0  # the same for CPU attention
    noise: float = 0.0  # relative deviation of single iterations (of a log-normal factor with median 1)
    bus_slowdown: float = 1.0  # the same for copies
    overlap_loss: float = 0.0  # see `Correction`

    def __post_init__(self) -> None:
        slowdowns = self.gpu_slowdown, self.cpu_slowdown, self.bus_slowdown
        if not (all(0 < slowdown < 100 for slowdown in slowdowns) and 0 <= self.noise < 1):
            raise ValueError("a slowdown must be between 0 and 100, noise at least 0 and below 1")
        if not 0 <= self.overlap_loss < 100:
            raise ValueError("the loss of overlapping must be at least 0 and below 100")


class Reality:
    """Gives iterations their true times and corrects the scheduler's cost model accordingly.

    Args:
        tables: the scheduler's initial cost model.
        seed: of the noise.
    """

    def __init__(self, tables: TableCostModel, mismatch: Mismatch, seed: int) -> None:
        self.believed = CorrectedCostModel.of(tables)  # for the scheduler
        self.true = CorrectedCostModel.of(tables)  # the actual machine
        true = self.true.correction
        true.device, true.host, true.bus = mismatch.gpu_slowdown, mismatch.cpu_slowdown, mismatch.bus_slowdown
        true.overlap_loss = mismatch.overlap_loss
        self._noise = mismatch.noise
        self._random = random.Random(seed)

    def carry_out(self, predicted: IterationTiming, shape: IterationShape) -> float:
        """Return the true time of an iteration in ms, and correct the scheduler's cost model.

        Args:
            predicted: the scheduler's prediction.
            shape: of the iteration.
        """
        # The shape contains prefill times as the scheduler predicts them.
        factor = self.true.correction.device / self.believed.correction.device
        batches = tuple(each._replace(prefill_ms=each.prefill_ms * factor) for each in shape.batches)
        timing = predict(self.true, shape._replace(batches=batches))
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
