"""Times the stages of synthetic iterations, which the model runner carries out like all others.

The timeline of the device's lane divides an iteration without gaps:

    |inputs|linear 0|attention|linear 1|attention|linear 2|tokens|
    <outside>       < a layer's decodes>                  < head >
                    |q, k, v|CPU attention|o|     in place of attention, if the CPU attends

A few layers stand for all: their weights exceed every cache, and every kind of attention occurs. Prompts
reuse weights and need fewer layers. One more layer ends them. No token is chosen unless the head is measured.
If a matrix is offloaded, linear stages are measured with all layers, which differ in their resident rows.
"""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from neo_desktop.engine.batch import BlockCopy, IterationPlan
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.layout import MAX_DECODES
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.moves import NAME as COPIES
from neo_desktop.engine.execute.timeline import Span, Timeline
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage, memory_of
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.profiling.grids import NEAR, Point, Stage
from neo_desktop.engine.profiling.synthetic import (
    GREEDY,
    Region,
    plan_of,
    region_bytes,
    sequence,
    stand_in_blocks,
    with_layers,
)
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.traced.decoder import TracedDecoder

MOST_RUNS = 3  # launched one by one, captured, launched as a graph
SHORT_CONTEXT = BLOCK_SIZE  # of decodes whose attention does not matter
FEW_ROWS = 8  # of an iteration whose time outside the layers counts
ROWS_STEP = 4  # ratio of consecutive row counts in shares
AROUND = (-0.15, 0.0, 0.15)  # offsets to try around the share of equal times;
CLEAR = 4.0  # if one side alone takes this many times longer, it gets nothing

Build = Callable[[Decoder, KVStorage, Timeline], ModelRunner]


class IterationTimer:
    """Runs synthetic iterations and returns the times of their stages, per layer if layers have the stage.

    The timer uses the KV pools of `storage` in place and overwrites them, so it must run before the first
    request. A small pool stands in for a pool that the policy lacks.

    Args:
        streams: None: the whole device.
        build: makes a model runner; None: `build_executor`.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        limits: SchedulerLimits,
        streams: Streams | None = None,
        build: Build | None = None,
    ) -> None:
        used_streams = streams or Streams(decoder.device)
        most_tokens, most_requests = limits.max_batch_tokens, limits.max_batch_requests
        self._build = build or (
            lambda part, pools, timeline: build_executor(
                part, pools, most_tokens, most_requests, timeline, used_streams
            )
        )
        self._decoder = decoder
        self.is_cuda = decoder.device.type == "cuda"
        self._is_traced = isinstance(decoder, TracedDecoder)  # no further layer can end its last one
        self._most_decodes = min(most_requests, MAX_DECODES)
        pools = {tier: _pool_of(tier, decoder, storage) for tier in MEASURED_TIERS}
        self._storage = KVStorage(pools, storage.states)
        self._all_layers = range(decoder.config.num_layers)
        self._few_layers, self._layers = _chosen_layers(decoder)
        layers = {*self._few_layers, *self._layers}
        self._regions = {tier: Region.of(decoder, pool, layers) for tier, pool in pools.items()}
        # True if decode attention is equal in all tiers: the same kind of memory and dtype.
        self.attends_alike = not self.is_cuda and len({(p.kind, p.dtype) for p in pools.values()}) == 1
        self._timeline = Timeline(max_spans=0)
        self._runner: tuple[Sequence[int], ModelRunner] | None = None  # its layers
        self._random = random.Random(0)
        self.outside_ms: list[float] = []  # of iterations of few rows: all time before the first layer
        # The CPU's part in a layer's linear stages, one value per measurement.
        self.host_linear_ms: defaultdict[Point, list[float]] = defaultdict(list)

    def capacity_tokens(self, tier: KVTier) -> int:
        """Return how many tokens the measured attention of one layer can cover."""
        return self._regions[tier].num_tokens

    def close(self) -> None:
        """Stop the model runner's threads, and free its memory."""
        if self._runner is not None:
            _, runner = self._runner
            runner.forget_graphs()
            runner.close()
            self._runner = None
            del runner
            if self.is_cuda:
                return_memory()

    def time(self, point: Point, turn: int) -> dict[Point, float]:
        """Measure a point once; return it and what else the iteration shows, in ms.

        Args:
            turn: number of this measurement; it selects the blocks.

        Raises:
            RuntimeError: the GPU has too little free memory, among others.
        """
        runner, plan = self._runner_for(point), self._plan(point, turn)
        for _ in range(MOST_RUNS):
            begun_ns = time.perf_counter_ns()
            timing = runner.execute(plan).timing
            ended_ns = time.perf_counter_ns()
            if timing is not None and not timing.is_first:
                break
        spans = self._timeline.last
        layers = self._layers_for(point)
        if point.stage is Stage.TRANSFER:
            copies = [span for span in spans if span.stage.name == COPIES]
            ns = max(span.end_ns for span in copies) - min(span.start_ns for span in copies)
            return {point: ns / 1e6 / len(layers)}
        times = _IterationTimes(spans, len(layers))
        tokens = plan.sub_batches[0].num_tokens
        is_decode = len(plan.sub_batches[0].sequences) == tokens
        found: dict[Point, float] = {}
        if point.stage is Stage.LINEAR and self._decoder.has_splits:
            found[point] = fmean(times.linear_ms)  # its layers differ
            self.host_linear_ms[point].append(times.host_linear_ms)
        elif not self._decoder.has_splits and is_decode is (tokens <= self._most_decodes):
            found[Point(Stage.LINEAR, tokens)] = median(times.linear_ms)  # single layers may be disturbed
        if point.stage is Stage.HEAD:
            found[point] = max(ended_ns - times.end_ns, 0) / 1e6
        if is_decode and tokens <= FEW_ROWS:
            self.outside_ms.append(max(times.start_ns - begun_ns, 0) / 1e6)
        if point.stage.is_attention:
            attends_on_host = point.stage.tier is not None and point.stage.tier.host_attends
            attention_ms = times.host_attention_ms if attends_on_host else times.between_ms
            found[point] = self._mean_of(layers, attention_ms)
            if attends_on_host:
                left = [times.between_ms[layer] - attention_ms[layer] for layer in attention_ms]
                found[Point(Stage.OFFLOAD, tokens)] = max(median(left), 0.0)
        return found

    def measure_shares(self, max_rows: int, seconds: float) -> None:
        """Find and set the best division of offloaded matrices, then of experts in host memory."""
        decoder, names = self._decoder, _undecided_shares(self._decoder)
        for name in names:

            def ms(rows: int, shares: StreamedShares, name: str = name) -> float:
                if getattr(decoder, name) != shares and self._runner is not None:
                    self._runner[1].forget_graphs()
                setattr(decoder, name, shares)
                point = Point(Stage.LINEAR, rows)
                return self.time(point, 0)[point]

            setattr(decoder, name, measured_shares(ms, max_rows, seconds / len(names)))
        self.close()  # its graphs have other shares
        self.host_linear_ms.clear()

    def _layers_for(self, point: Point) -> Sequence[int]:
        match point.stage:
            case Stage.LINEAR if self._decoder.has_splits:
                return self._all_layers
            case Stage.TRANSFER if not self._decoder.has_splits:
                return self._all_layers  # moves run one layer ahead
            case Stage.FIRST_CHUNK_ATTENTION | Stage.LATER_CHUNK_ATTENTION | Stage.HEAD:
                return self._few_layers
        return self._layers

    def _runner_for(self, point: Point) -> ModelRunner:
        layers = self._layers_for(point)
        if self._runner is None or self._runner[0] != layers:
            self.close()
            pools = {tier: self._storage[tier].with_layers(layers) for tier in self._storage.tiers}
            storage = KVStorage(pools, self._storage.states)
            self._runner = layers, self._build(with_layers(self._decoder, layers), storage, self._timeline)
        return self._runner[1]

    def _plan(self, point: Point, turn: int) -> IterationPlan:
        if point.stage is Stage.TRANSFER:
            return self._moves(point.x, turn)
        if point.stage.is_prefill:
            return self._sequences(NEAR, [(point.y - point.x, point.x)], turn)
        if point.stage.tier is not None:
            lens = self._context_lens(point.x, point.y)
            return self._sequences(point.stage.tier, [(length - 1, 1) for length in lens], turn)
        longest = min(self._decoder.config.max_context_tokens, self.capacity_tokens(NEAR))
        if point.stage is Stage.HEAD or point.x <= self._most_decodes:
            decodes = [(min(SHORT_CONTEXT, longest) - 1, 1)] * point.x
            return self._sequences(NEAR, decodes, turn, is_sampled=point.stage is Stage.HEAD)
        starts = range(0, point.x, longest)
        return self._sequences(NEAR, [(0, min(longest, point.x - start)) for start in starts], turn)

    def _sequences(
        self, tier: KVTier, parts: Sequence[tuple[int, int]], turn: int, *, is_sampled: bool = False
    ) -> IterationPlan:
        """Return the plan of requests, each given by its computed tokens and the tokens to compute.

        Args:
            is_sampled: choose a token for every request.
        """
        most = self._decoder.config.max_context_tokens  # learned positions end there
        parts = [(min(start, max(most - tokens, 0)), min(tokens, most)) for start, tokens in parts]
        tables = self._regions[tier].tables([start + tokens for start, tokens in parts], turn)
        return plan_of(
            sequence(index, tier, *part, table, GREEDY if is_sampled or self._is_traced else None)
            for index, (part, table) in enumerate(zip(parts, tables, strict=True))
        )

    def _moves(self, tokens: int, turn: int) -> IterationPlan:
        """Return a plan that moves blocks beside a decode; the direction alternates."""
        source, target = MEASURED_TIERS if turn % 2 == 0 else MEASURED_TIERS[::-1]
        most = min(len(region.order) for region in self._regions.values())
        count = min(-(-tokens // BLOCK_SIZE), most)
        pairs = zip(*(self._regions[tier].blocks(count, turn) for tier in (source, target)), strict=True)
        copies = [BlockCopy(source, old, target, new) for old, new in pairs]
        return replace(self._plan(Point(Stage.LINEAR, 1), turn), copies=tuple(copies))

    def _context_lens(self, requests: int, mean_context: int) -> list[int]:
        """Return contexts from half to one and a half times the mean: real requests differ."""
        if requests == 1:
            return [mean_context]
        shares = [0.5 + self._random.random() for _ in range(requests)]
        factor = mean_context * requests / sum(shares)
        return [max(round(share * factor), 1) for share in shares]

    def _mean_of(self, layers: Sequence[int], ms: Mapping[int, float]) -> float:
        """Return the mean over the model's layers: a sliding window shortens attention."""
        windows = self._decoder.config.layer_windows
        measured: defaultdict[int | None, list[float]] = defaultdict(list)
        for index, layer_ms in ms.items():
            measured[windows[layers[index]]].append(layer_ms)
        return fmean(median(measured[window]) for window in windows)


class _IterationTimes:
    """The stages of a recorded iteration, in ms.

    The linear stages with number l are between the attention of layers l - 1 and l.
    """

    def __init__(self, spans: Sequence[Span], num_layers: int) -> None:
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        attention_ns: Counter[int] = Counter()
        products_ns: Counter[int] = Counter()
        for span in spans:
            layer = span.stage.layer
            if span.lane == Lane.DEVICE and span.stage.name == "linear":
                starts[layer] = min(starts.get(layer, span.start_ns), span.start_ns)
                ends[layer] = max(ends.get(layer, 0), span.end_ns)
            elif span.stage.name == "CPU attention":
                attention_ns[layer] += span.end_ns - span.start_ns
            elif span.stage.name.endswith("on the CPU"):
                products_ns[layer] += span.end_ns - span.start_ns
        linear_ms = {layer: (ends[layer] - start) / 1e6 for layer, start in starts.items()}
        # The first and the last linear stages together are those of a layer.
        inner = [ms for layer, ms in linear_ms.items() if 0 < layer < num_layers]
        self.linear_ms = inner or [sum(linear_ms.values())]  # by layer
        self.start_ns, self.end_ns = starts[0], max(ends.values())
        # by layer, from its linear stages to the next ones
        self.between_ms = {
            layer: (starts[layer + 1] - ends[layer]) / 1e6 for layer in starts if layer + 1 in starts
        }
        self.host_attention_ms = {layer: attention_ns[layer] / 1e6 for layer in self.between_ms}
        self.host_linear_ms = sum(products_ns.values()) / 1e6 / num_layers


def _chosen_layers(decoder: Decoder) -> tuple[Sequence[int], Sequence[int]]:
    """Return layers with every kind of attention, and more, whose weights exceed the caches."""
    config = decoder.config
    every = range(config.num_layers)
    if isinstance(decoder, TracedDecoder):
        return every, every  # its stages are one piece
    kinds = {config.layer_windows.index(window) for window in config.layer_windows}
    layer_bytes = max(decoder.nbytes // config.num_layers, 1)
    count = min(-(-region_bytes(decoder, decoder.device) // layer_bytes), config.num_layers)
    spread = {index * config.num_layers // count for index in range(count)}
    return [*sorted(kinds), every[-1]], [*sorted(kinds | spread), every[-1]]


def _pool_of(tier: KVTier, decoder: Decoder, storage: KVStorage) -> KVPool:
    pool = storage.get(tier)
    if pool is not None and pool.num_blocks:
        return pool
    device = memory_of(tier, decoder.device)
    num_blocks = stand_in_blocks(decoder, device)
    return KVPool(decoder.config, num_blocks, BLOCK_SIZE, decoder.dtype, device, sinks=decoder.sinks)


def _undecided_shares(decoder: Decoder) -> list[str]:
    """Return the attributes with the shares of this model: of matrices, and of experts."""
    split = [name for name, linear in decoder.matrices.items() if isinstance(linear, OffloadedLinear)]
    of_experts = ["experts_" in name for name in split]
    return ["streamed_shares"] * (not all(of_experts)) + ["streamed_experts"] * any(of_experts)


def measured_shares(
    measure: Callable[[int, StreamedShares], float], max_rows: int, seconds: float
) -> StreamedShares:
    """Return the best shares for 1, 4, 16 .. rows: HeteGen's section 4.4.

    The CPU alone and the bus alone are measured first. Their times give the share at which both take equal
    time; that share and its neighbours are measured next. The share only grows with the rows, because the
    CPU's matmuls become compute-bound.

    Args:
        measure: returns the time of a layer's linear stages for a number of rows and these shares, in ms.
        max_rows: of a matmul.
        seconds: approximate duration; unmeasured larger row counts stream everything.
    """
    end = time.perf_counter() + seconds
    sizes, shares, least = [], [], 0.0
    rows = 1
    while rows <= max_rows and least < 1.0:
        least = max(_best(measure, rows), least)
        sizes.append(rows)
        shares.append(least)
        rows *= ROWS_STEP
        if rows <= max_rows and least < 1.0 and time.perf_counter() > end:
            sizes.append(max_rows)
            shares.append(1.0)
            break
    return StreamedShares(tuple(sizes), tuple(shares))


def _best(measure: Callable[[int, StreamedShares], float], rows: int) -> float:
    def ms(share: float) -> float:
        return min(measure(rows, StreamedShares((1,), (share,))) for _ in range(2))

    on_cpu, on_bus = ms(0.0), ms(1.0)
    if on_cpu > CLEAR * on_bus:
        return 1.0
    crossing = on_cpu / (on_cpu + on_bus)
    tried = {0.0: on_cpu, 1.0: on_bus}
    for step in AROUND:
        share = min(max(crossing + step, 0.0), 1.0)
        if share not in tried:
            tried[share] = ms(share)
    return min(tried, key=lambda share: tried[share])
