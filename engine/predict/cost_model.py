"""The cost model: times of stages, interpolated in measured tables."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import partial
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple, Self

from neo_desktop.engine.batch import NO_CONTENTS, Contents
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.linear.shares import UNMEASURED, StreamedShares

CORRECTION_STEP = 1.2  # ratio of corrections that differ by 1 in `Correction.steps`
EXCESS_UNIT = 0.25  # smaller excess hardly changes the key
FILE_VERSION = 9  # of the JSON form of the tables


class MemoryShares(NamedTuple):
    """Share of the host memory's bandwidth that each user takes while it works; 1 is all."""

    copies: float = 0.0  # copies over the bus
    attention: float = 0.0  # the CPU's attention and matmuls


UNSHARED = MemoryShares()


class NetworkLatency(NamedTuple):
    """Time to send rows to a worker and receive its output, in ms.

    Meanwhile the worker attends for other rows, and other rows may be in transit.
    """

    all: float
    sending: float  # part of `all` in which the network is busy


NO_LATENCY = NetworkLatency(0.0, 0.0)


@dataclass(slots=True)
class Correction:
    """Factors on the times of tables, which follow measured iterations; see `CorrectedCostModel`."""

    device: float = 1.0
    host: float = 1.0
    bus: float = 1.0  # for copies of streamed KV
    excess: Contents = NO_CONTENTS  # time beyond the tables, per ms of a kind of work
    means: Sequence[float] = ()  # of the excess; `excess` is a cautious, lower value
    variances: Sequence[float] = ()  # of `device` and `means`; see `CorrectedCostModel`

    @property
    def steps(self) -> tuple[float, ...]:
        """Logarithms of the factors: corrections that differ by less than 1 are similar."""
        factors = self.device, self.host, self.bus, *(EXCESS_UNIT + excess for excess in self.excess)
        return tuple(math.log(factor, CORRECTION_STEP) for factor in factors)


def _check_axis(axis: Sequence[float]) -> None:
    if not axis or axis[0] <= 0 or any(b <= a for a, b in pairwise(axis)):
        raise ValueError(f"the points of an axis must be positive and rising, got {list(axis)}")


def _checked_times(times: Iterable[float]) -> Iterable[float]:
    for ms in times:
        if not 0 <= ms < float("inf"):
            raise ValueError(f"a time must be at least 0 and finite, got {ms}")
        yield float(ms)


class Curve:
    """A piecewise linear, non-decreasing function through measured points.

    It is constant left of the first point: one token reads the same weights as eight. Right of the last point
    it continues with the slope of the last half of the measured range, so that one noisy point cannot bend
    it.

    Args:
        x: rising, positive.
        ms: one time per point. A time below its predecessor is noise and is raised.
    """

    def __init__(self, x: Sequence[float], ms: Sequence[float]) -> None:
        _check_axis(x)
        if len(ms) != len(x):
            raise ValueError(f"a curve needs one time for each of its {len(x)} points, got {len(ms)}")
        self.x = tuple(x)
        self.ms = tuple(accumulate(_checked_times(ms), max))
        half = min(bisect_right(self.x, self.x[-1] / 2), len(self.x) - 1)
        start = max(half - 1, 0)
        run = self.x[-1] - self.x[start]
        self._tail_slope = (self.ms[-1] - self.ms[start]) / run if run else self.ms[-1] / self.x[-1]
        self._known: dict[float, float] = {}

    def __call__(self, x: float) -> float:
        """Return the time at x; 0 if x is not positive."""
        known = self._known.get(x)
        if known is None:
            known = self._known[x] = self._at(x)
        return known

    def _at(self, x: float) -> float:
        if x <= 0:
            return 0.0
        if x <= self.x[0]:
            return self.ms[0]
        if x >= self.x[-1]:
            return self.ms[-1] + (x - self.x[-1]) * self._tail_slope
        i = bisect_right(self.x, x)
        share = (x - self.x[i - 1]) / (self.x[i] - self.x[i - 1])
        return self.ms[i - 1] + share * (self.ms[i] - self.ms[i - 1])


class Surface:
    """A bilinear function over a grid of measured points, non-decreasing along both axes.

    Bilinear is exact for `a + b*x + c*y + d*x*y`: the growth of attention with requests and context.
    Outside the grid it extrapolates the nearest cell, but never below the grid's edge.

    Args:
        x: rising, positive.
        y: rising, positive.
        ms: [len(x)][len(y)] times.
    """

    def __init__(self, x: Sequence[float], y: Sequence[float], ms: Sequence[Sequence[float]]) -> None:
        _check_axis(x)
        _check_axis(y)
        if len(x) < 2 or len(y) < 2:
            raise ValueError("a surface needs at least two points along each axis")
        if len(ms) != len(x) or any(len(row) != len(y) for row in ms):
            raise ValueError(f"a surface over {len(x)} x {len(y)} points needs as many times")
        self.x, self.y = tuple(x), tuple(y)
        along_y = [tuple(accumulate(_checked_times(row), max)) for row in ms]
        columns = [tuple(accumulate(column, max)) for column in zip(*along_y, strict=True)]
        self.ms: tuple[tuple[float, ...], ...] = tuple(zip(*columns, strict=True))

    def __call__(self, x: float, y: float) -> float:
        """Return the time at (x, y); 0 if x is not positive."""
        if x <= 0:
            return 0.0
        # The cell that contains the point or is nearest, and the position within it: 0 to 1 inside. Inlined
        # because schedulers spend much of their time here.
        xs, ys = self.x, self.y
        i = bisect_right(xs, x, 1, len(xs) - 1) - 1
        u = (x - xs[i]) / (xs[i + 1] - xs[i])
        y = y if y > ys[0] else ys[0]
        j = bisect_right(ys, y, 1, len(ys) - 1) - 1
        w = (y - ys[j]) / (ys[j + 1] - ys[j])
        near, far = self.ms[i], self.ms[i + 1]
        low = near[j] + w * (near[j + 1] - near[j])
        ms = low + u * (far[j] + w * (far[j + 1] - far[j]) - low)
        # Left of the grid, fewer requests can take less time, but not less than 0.
        least = 0.0 if u < 0 else near[0]
        return ms if ms > least else least


NOTHING = Curve((1,), (0,))
FREE = Surface((1, 2), (1, 2), ((0, 0), (0, 0)))


@dataclass(frozen=True)
class Network:
    """Network time to a worker and back, by requests; see `NetworkLatency`."""

    all: Curve
    sending: Curve


@dataclass(frozen=True)
class TableCostModel:
    """Predicted times in milliseconds, interpolated in measured tables; the time of a stage is for one layer.

    Names of NEO's section 3.2 stand beside the stages. 0 tokens or requests take 0 ms.

    Decode attention is tabulated over (requests, mean context per request), so that every grid point can
    occur. A prompt's first chunk attends only to itself: a causal kernel skips half of the work and gathers
    nothing from the cache. Later chunks pay for both, tabulated over (chunk tokens, context at its end). One
    table for both would smooth over the step between them.
    """

    num_layers: int
    overlaps: bool  # the host attends while the device computes; False: both share one processor
    iteration_ms: float  # of an iteration outside its layers: scheduling, launches, copying tokens back
    linear: Curve
    head: Curve
    offload: Curve
    transfer: Curve
    first_chunk_attention: Curve
    later_chunk_attention: Surface
    attention: Mapping[KVTier, Surface]
    host_linear: Curve = NOTHING
    swap: Curve = NOTHING
    duplex: float = 1.0  # slowdown of streamed KV copies with equal traffic in the other direction: 1 to 2
    memory_shares: MemoryShares = UNSHARED
    # Shares of offloaded matrices, and of experts in host memory, at the time of the measurement.
    streamed_shares: StreamedShares = UNMEASURED
    streamed_experts: StreamedShares = UNMEASURED
    # Networks of workers. Like the workers' attention, they are measured at each start and not saved.
    networks: Mapping[KVTier, Network] = field(default_factory=dict)
    correction: Correction = field(default_factory=Correction)

    @property
    def outside_ms(self) -> float:
        """Time of an iteration outside its layers."""
        return self.iteration_ms * self.correction.device

    @property
    def launch_ms(self) -> float:
        """Time that a layer takes longer with prompts than within a graph."""
        return (self.correction.excess.launched + self.correction.excess.prompts) * self.linear(1)

    def excess_ms(self, contents: Contents) -> float:
        """Return the time of an iteration beyond its stages."""
        return float(sum(map(mul, self.correction.excess, contents)))

    def linear_ms(self, tokens: float) -> float:
        """Return T_l: a layer without attention."""
        return self.linear(tokens) * self.correction.device

    def host_linear_ms(self, tokens: int) -> float:
        """Return the host's matmul time within T_l; 0 without offloaded weights or overlap."""
        return self.host_linear(tokens) * self.correction.host

    def prefill_attention_ms(self, tokens: int, start: int) -> float:
        """Return T_pf: attention of a prompt chunk after `start` computed tokens."""
        ms = self.first_chunk_attention(tokens)
        if start:  # noise must not make a chunk with context cheaper than one without
            ms = max(self.later_chunk_attention(tokens, start + tokens), ms)
        return ms * self.correction.device

    def attention_ms(self, tier: KVTier, requests: int, context_tokens: int) -> float:
        """Return T_ga or T_ca: decode attention in a tier, with the append of the new K and V.

        `context_tokens` is the sum over the requests. `swap_ms` covers the copies of streamed KV.
        """
        if not requests:
            return 0.0
        correction = self.correction
        factor = correction.host if tier.host_attends else correction.device
        return self.attention[tier.as_attended](requests, context_tokens / requests) * factor

    def offload_ms(self, requests: int) -> float:
        """Return the time to copy q, k, v to the host and the attention output back, without network.

        Most of it is device work and its launches.
        """
        return self.offload(requests) * self.correction.device

    def network_ms(self, tier: KVTier, requests: int) -> NetworkLatency:
        """Return the network time of these decodes in both directions; 0 for local tiers.

        The host's factor applies, because the measured attention of workers includes the network.
        """
        network = self.networks.get(tier)
        if network is None:
            return NO_LATENCY
        factor = self.correction.host
        return NetworkLatency(network.all(requests) * factor, network.sending(requests) * factor)

    def transfer_ms(self, tokens: int) -> float:
        """Return T_x: KV over the bus, one way, row by row because the layouts differ."""
        return self.transfer(tokens)

    def swap_ms(self, tokens: int) -> float:
        """Return the copy time of streamed KV, one way; host and device layouts are equal."""
        return self.swap(tokens) * self.correction.bus

    def head_ms(self, rows: int) -> float:
        """Return the time of final norm, logits and sampling; once per iteration."""
        return self.head(rows) * self.correction.device

    def to_json(self) -> dict[str, Any]:
        return {"version": FILE_VERSION} | {each.name: _plain(getattr(self, each.name)) for each in _saved()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Make a model from the result of `to_json`.

        Raises:
            ValueError: a value is missing or out of range, or the version differs.
        """
        if data.get("version") != FILE_VERSION:
            raise ValueError(
                f"the cost tables have version {data.get('version')!r}; this program reads "
                f"version {FILE_VERSION}"
            )
        try:
            return cls(**{f.name: _MAKERS.get(f.type, lambda value: value)(data[f.name]) for f in _saved()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these cost tables are damaged: {error!r}") from None


# Type of a field -> how to make it from plain data.
_MAKERS: Mapping[object, Callable[[Any], Any]] = {
    Curve: lambda data: Curve(**data),
    Surface: lambda data: Surface(**data),
    Mapping[KVTier, Surface]: lambda data: {tier: Surface(**data[tier.name]) for tier in MEASURED_TIERS},
    MemoryShares: lambda data: MemoryShares(*map(float, data)),
    StreamedShares: lambda data: StreamedShares(tuple(data["rows"]), tuple(data["shares"])),
}


def _saved() -> "list[Field[Any]]":
    """Return the fields of the JSON form."""
    return [each for each in fields(TableCostModel) if each.name not in ("networks", "correction")]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {tier.name: _plain(surface) for tier, surface in value.items()}
    if isinstance(value, Curve):
        return {"x": value.x, "ms": value.ms}
    if isinstance(value, Surface):
        return {"x": value.x, "y": value.y, "ms": value.ms}
    return asdict(value) if isinstance(value, StreamedShares) else value


# All work is free, and no plan is better than another.
ZERO = TableCostModel(
    num_layers=1,
    overlaps=True,
    iteration_ms=0.0,
    linear=NOTHING,
    head=NOTHING,
    offload=NOTHING,
    transfer=NOTHING,
    first_chunk_attention=NOTHING,
    later_chunk_attention=FREE,
    attention=defaultdict(partial(Surface, FREE.x, FREE.y, FREE.ms)),
)
