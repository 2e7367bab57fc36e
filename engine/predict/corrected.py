"""A cost model that adapts to measured iterations.

The tables contain the dependence of times on sizes. Changes at run time (clocks, heat, other programs) scale
all of these times. Other work is not in the tables at all: they were measured within CUDA graphs, and no
graph holds an iteration with prompts, moves or streamed KV, so each of its layers is launched by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from operator import mul
from typing import Self

from neo_desktop.engine.batch import NO_CONTENTS, Contents, IterationTiming
from neo_desktop.engine.predict.cost_model import Correction, TableCostModel


class CorrectedCostModel(TableCostModel):
    """A factor each for the device's stages, the host's stages and copies, and an excess per kind of work.

    The excess explains iterations that take longer than their stages (`Correction.excess`). It and the
    device's factor are coefficients of a linear model of the measured times. Each is learned in proportion to
    its uncertainty, as in a Kalman filter without covariances: what many iterations have confirmed is not
    blamed for the rest. An excess that does not occur is forgotten slowly, so that the work is tried again.

    The factor of copies controls the amount of streamed KV. With too much, the device waits; with too little,
    some bus time is wasted. So the factor rises quickly when copies slow down, and falls slowly. The duration
    of a copy does not depend on the number of copies, so the control does not oscillate.
    """

    SMOOTHING = 0.05  # weight of the newest iteration
    SLOWER_BUS, FASTER_BUS = 0.3, 0.02  # the same for copies
    DEVICE_BOUND = 0.1  # the host's largest share in an iteration that corrects the device's factor
    LOWEST, HIGHEST = 1 / 16, 16.0  # of a factor
    NOISE = 0.1  # standard deviation of an iteration's relative time
    UNSURE = 0.2, 1.0, 0.3, 0.3, 0.3, 0.3, 1.0  # standard deviations before anything is learned
    DRIFT = 0.005  # standard deviation of their change per iteration
    FORGETTING = 1 / 4000  # share of an excess per iteration without its work

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
        stages_ms = predicted_ms - predicted.excess_ms
        if stages_ms <= 0 or measured_ms <= 0 or not math.isfinite(measured_ms):
            return
        is_device_bound = host_ms <= predicted.total_ms * (self.DEVICE_BOUND if self.overlaps else 0.5)
        amounts = stages_ms / correction.device if is_device_bound else 0.0, *predicted.contents
        self._explain(amounts, stages_ms, measured_ms)

    def _explain(self, amounts: Sequence[float], stages_ms: float, measured_ms: float) -> None:
        """Divide an iteration's error among the device's factor and the kinds of excess.

        Args:
            amounts: time that each coefficient explains, per unit.
        """
        correction, most = self.correction, [deviation**2 for deviation in self.UNSURE]
        means = correction.means or [0.0] * len(NO_CONTENTS)
        variances = [
            min(known + self.DRIFT**2, limit)
            for known, limit in zip(correction.variances or most, most, strict=True)
        ]
        predicted_ms = stages_ms + sum(map(mul, means, amounts[1:]))
        # The clamp limits the effect of outliers (a page fault, another program).
        error_ms = min(measured_ms, 3.0 * predicted_ms) - predicted_ms
        blames = list(map(mul, variances, amounts))
        total = sum(map(mul, blames, amounts)) + (self.NOISE * predicted_ms) ** 2
        correction.device += blames[0] / total * error_ms
        correction.device = min(max(correction.device, self.LOWEST), self.HIGHEST)
        correction.means = [
            max(mean + blame / total * error_ms if amount else mean * (1.0 - self.FORGETTING), 0.0)
            for mean, blame, amount in zip(means, blames[1:], amounts[1:], strict=True)
        ]
        correction.variances = [
            variance * (1.0 - blame * amount / total)
            for variance, blame, amount in zip(variances, blames, amounts, strict=True)
        ]
        correction.excess = Contents(
            *(
                max(mean - math.sqrt(variance), 0.0)
                for mean, variance in zip(correction.means, correction.variances[1:], strict=True)
            )
        )

    def _corrected(
        self, factor: float, predicted_ms: float, measured_ms: float, smoothing: float = SMOOTHING
    ) -> float:
        if predicted_ms <= 0 or measured_ms <= 0:
            return factor
        # A factor is a ratio: averaging its logarithm treats doubling and halving alike. The clamp limits
        # the effect of outliers (a page fault, another program) to a doubling.
        ratio = min(max(measured_ms / predicted_ms, 0.5), 2.0)
        return float(min(max(factor * ratio**smoothing, self.LOWEST), self.HIGHEST))
