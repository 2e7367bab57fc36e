"""A cost model that adapts to measured iterations.

The tables contain the dependence of times on sizes. Changes at run time (clocks, heat, other programs) scale
all of these times. So does the loss of CUDA graphs: the tables were measured with graphs, and without them
all device work slows down by a common factor.
"""

from dataclasses import fields
from typing import Self

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.predict.cost_model import Correction, TableCostModel


class CorrectedCostModel(TableCostModel):
    """A correction factor each for the device's stages, the host's stages, and copies of streamed KV.

    Iterations in which the host attends can take longer than their stages predict, e.g. where launches are
    slow. `overlap_loss` is the excess, per ms of that attention.

    The factor of copies controls the amount of streamed KV. With too much, the device waits; with too little,
    some bus time is wasted. So the factor rises quickly when copies slow down, and falls slowly. The duration
    of a copy does not depend on the number of copies, so the control does not oscillate.
    """

    SMOOTHING = 0.05  # weight of the newest iteration
    SLOWER_BUS, FASTER_BUS = 0.3, 0.02  # the same for copies
    LOSS_SMOOTHING = 0.1  # the same for the loss, in an iteration that is all attention of the host
    NOISE = 0.25  # smaller losses do not count
    DEVICE_BOUND = 0.1  # the host's largest share in an iteration that corrects the device's factor
    LOWEST, HIGHEST = 0.25, 4.0

    @classmethod
    def of(cls, tables: TableCostModel) -> Self:
        """Return a model with the same tables and a correction of its own."""
        return cls(
            **{each.name: getattr(tables, each.name) for each in fields(tables)}
            | {"correction": Correction()}
        )

    def learn(self, predicted: IterationTiming, measured: IterationTiming) -> None:
        """Compare an iteration with its prediction; ignore the first of its sizes, which compiles."""
        if measured.is_first:
            return
        correction, host_ms = self.correction, predicted.host_attention_ms
        if host_ms > 0:
            correction.host = self._corrected(correction.host, host_ms, measured.host_attention_ms)
        if measured.copied_tokens:  # may exceed the prediction: gaps between blocks are copied as well
            expected_ms = self.swap_ms(measured.copied_tokens) * self.num_layers
            smoothing = self.SLOWER_BUS if measured.copies_ms > expected_ms else self.FASTER_BUS
            correction.bus = self._corrected(correction.bus, expected_ms, measured.copies_ms, smoothing)
        # The wait for copies does not count as device time.
        predicted_ms, measured_ms = (each.total_ms - each.copy_wait_ms for each in (predicted, measured))
        if host_ms <= predicted.total_ms * (self.DEVICE_BOUND if self.overlaps else 0.5):
            correction.device = self._corrected(correction.device, predicted_ms, measured_ms)
        elif self.overlaps and predicted_ms > 0:
            loss = correction.overlap_loss + (measured_ms - predicted_ms) / host_ms
            loss = min(max(loss, -self.HIGHEST), self.HIGHEST)
            weight = self.LOSS_SMOOTHING * min(host_ms / predicted_ms, 1.0)
            correction.mean_loss += weight * (loss - correction.mean_loss)
            correction.overlap_loss = correction.mean_loss if correction.mean_loss > self.NOISE else 0.0

    def _corrected(
        self, factor: float, predicted_ms: float, measured_ms: float, smoothing: float = SMOOTHING
    ) -> float:
        if predicted_ms <= 0 or measured_ms <= 0:
            return factor
        # A factor is a ratio: averaging its logarithm treats doubling and halving alike. The clamp limits
        # the effect of outliers (a page fault, another program) to a doubling.
        ratio = min(max(measured_ms / predicted_ms, 0.5), 2.0)
        return float(min(max(factor * ratio**smoothing, self.LOWEST), self.HIGHEST))
