"""A cost model that adapts to measured iterations.

The tables contain the dependence of times on sizes. Changes at run time (clocks, heat, other programs) scale
all of these times. So does the loss of CUDA graphs: the tables were measured with graphs, and without them
all device work slows down by a common factor.
"""

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel, MemoryShares, NetworkLatency


class CorrectedCostModel:
    """A correction factor each for the device's stages, the host's stages, and copies of streamed KV.

    Iterations in which the host attends can take longer than their stages predict, e.g. where launches are
    slow. `overlap_loss` is the excess, per ms of that attention.

    The factor of copies controls the amount of streamed KV. With too much, the device waits; with too little,
    some bus time is wasted. So the factor rises quickly when copies slow down, and falls slowly. The duration
    of a copy does not depend on the number of copies, so the control does not oscillate.

    Args:
        base: the uncorrected model.
    """

    SMOOTHING = 0.05  # weight of the newest iteration
    SLOWER_BUS, FASTER_BUS = 0.3, 0.02  # the same for copies
    LOSS_SMOOTHING = 0.1  # the same for the loss, in an iteration that is all attention of the host
    NOISE = 0.25  # smaller losses do not count
    DEVICE_BOUND = 0.1  # the host's largest share in an iteration that corrects the device's factor
    NEARLY_ALL = 0.8  # copies that take this share of an iteration may bound it
    A_LITTLE = 1.02
    LOWEST, HIGHEST = 0.25, 4.0

    def __init__(self, base: CostModel) -> None:
        self._base = base
        self.device_factor = 1.0
        self.host_factor = 1.0
        self.bus_factor = 1.0
        self.overlap_loss = self._mean_loss = base.overlap_loss

    @property
    def base(self) -> CostModel:
        """The uncorrected model."""
        return self._base

    @property
    def num_layers(self) -> int:
        return self._base.num_layers

    @property
    def overlaps(self) -> bool:
        return self._base.overlaps

    @property
    def iteration_ms(self) -> float:
        return self._base.iteration_ms * self.device_factor

    def linear_ms(self, tokens: int) -> float:
        return self._base.linear_ms(tokens) * self.device_factor

    def host_linear_ms(self, tokens: int) -> float:
        return self._base.host_linear_ms(tokens) * self.host_factor

    def prefill_attention_ms(self, tokens: int, start: int) -> float:
        return self._base.prefill_attention_ms(tokens, start) * self.device_factor

    def attention_ms(self, tier: KVTier, requests: int, context_tokens: int) -> float:
        factor = self.host_factor if tier.host_attends else self.device_factor
        return self._base.attention_ms(tier, requests, context_tokens) * factor

    def offload_ms(self, requests: int) -> float:
        """Scale by the device's factor: most of it is device work and its launches."""
        return self._base.offload_ms(requests) * self.device_factor

    def network_ms(self, tier: KVTier, requests: int) -> NetworkLatency:
        """Scale by the host's factor: the measured attention of workers includes the network."""
        way = self._base.network_ms(tier, requests)
        return NetworkLatency(*(ms * self.host_factor for ms in way))

    def transfer_ms(self, tokens: int) -> float:
        return self._base.transfer_ms(tokens)

    def swap_ms(self, tokens: int) -> float:
        return self._base.swap_ms(tokens) * self.bus_factor

    @property
    def duplex(self) -> float:
        return self._base.duplex

    @property
    def memory_shares(self) -> MemoryShares:
        return self._base.memory_shares

    def head_ms(self, rows: int) -> float:
        return self._base.head_ms(rows) * self.device_factor

    def learn(self, predicted: IterationTiming, measured: IterationTiming) -> None:
        """Compare an iteration with its prediction; ignore the first of its sizes, which compiles."""
        if measured.is_first:
            return
        host_ms = predicted.host_attention_ms
        if host_ms > 0:
            self.host_factor = self._corrected(self.host_factor, host_ms, measured.host_attention_ms)
        if measured.copied_tokens:  # may exceed the prediction: gaps between blocks are copied as well
            expected_ms = self.swap_ms(measured.copied_tokens) * self.num_layers
            smoothing = self.SLOWER_BUS if measured.copies_ms > expected_ms else self.FASTER_BUS
            self.bus_factor = self._corrected(self.bus_factor, expected_ms, measured.copies_ms, smoothing)
        if self._waits_for_copies(predicted, measured):
            return
        # The wait for copies does not count as device time.
        predicted_ms, measured_ms = (each.total_ms - each.copy_wait_ms for each in (predicted, measured))
        if host_ms <= predicted.total_ms * (self.DEVICE_BOUND if self.overlaps else 0.5):
            self.device_factor = self._corrected(self.device_factor, predicted_ms, measured_ms)
        elif self.overlaps and predicted_ms > 0:
            loss = self.overlap_loss + (measured_ms - predicted_ms) / host_ms
            loss = min(max(loss, -self.HIGHEST), self.HIGHEST)
            weight = self.LOSS_SMOOTHING * min(host_ms / predicted_ms, 1.0)
            self._mean_loss += weight * (loss - self._mean_loss)
            self.overlap_loss = self._mean_loss if self._mean_loss > self.NOISE else 0.0

    def _waits_for_copies(self, predicted: IterationTiming, measured: IterationTiming) -> bool:
        """True if copies take most of the iteration, and a larger part than predicted."""
        expected_ms = (
            measured.total_ms * predicted.copies_ms / predicted.total_ms if predicted.total_ms else 0.0
        )
        most_ms = max(self.NEARLY_ALL * measured.total_ms, self.A_LITTLE * expected_ms)
        return measured.copies_ms > most_ms

    def _corrected(
        self, factor: float, predicted_ms: float, measured_ms: float, smoothing: float = SMOOTHING
    ) -> float:
        if predicted_ms <= 0 or measured_ms <= 0:
            return factor
        # A factor is a ratio: averaging its logarithm treats doubling and halving alike. The clamp limits
        # the effect of outliers (a page fault, another program) to a doubling.
        ratio = min(max(measured_ms / predicted_ms, 0.5), 2.0)
        return float(min(max(factor * ratio**smoothing, self.LOWEST), self.HIGHEST))
