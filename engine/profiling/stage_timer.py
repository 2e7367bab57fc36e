"""Times single stages of an iteration on the loaded model: what the profiler tabulates and the bench checks.

Every measurement works on other memory than the one before: another layer's weights, other KV blocks. In a
real iteration they come from memory, too, and not from a cache that the last repetition has filled.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy, SamplingInput
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.cuda.streams import Streams, WholeDevice
from neo_desktop.engine.execute.backend import open_backend
from neo_desktop.engine.execute.build_program import padded_block_tables
from neo_desktop.engine.execute.lane import Recorder
from neo_desktop.engine.execute.layout import MAX_DECODES
from neo_desktop.engine.execute.prefill import Prefill
from neo_desktop.engine.execute.prompts import DevicePrompts, slots_of
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import timed_event
from neo_desktop.engine.execute.transfers import Moves, TransferMemory
from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage, memory_of
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.engine.profiling.captured import graph_ms, launch_ms
from neo_desktop.engine.profiling.hand_off import HandOff
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Scratch, Stages, State

LAYERS_AT_ONCE = 4  # on a GPU: what runs ahead of the GPU hides the launch of the first kernel
MIN_ROWS = 32  # a grid has at least two points along each axis, whatever the limits
GPU_REGION_BYTES = 256 * 1024**2  # several times the L2 cache of any GPU
TOY_REGION_BYTES = 8 * 1024**2
ROWS_AT_ONCE = 4096  # are written before the first measurement
FREED_BYTES = 31 * 1024**2  # nearly the largest piece that glibc's malloc ever learns to keep
MIN_HOST_REGION_BYTES, MAX_HOST_REGION_BYTES = 64 * 1024**2, 1024**3


NEAR = next(place for place in PLACES if not place.host_attends)  # whose KV prompts attend to fastest


class Stage(StrEnum):
    """A part of an iteration, under the name of its table in `TableCostModel`."""

    LINEAR = "linear"  # x: tokens
    HEAD = "head"  # x: rows
    HAND_OFF = "hand_off"  # x: requests
    TRANSFER = "transfer"  # x: tokens
    FIRST_CHUNK_ATTENTION = "first_chunk_attention"  # of a prompt; x: tokens, y: the same
    LATER_CHUNK_ATTENTION = "later_chunk_attention"  # x: tokens, y: context at its end, more than x
    GPU_ATTENTION = "gpu_attention"  # x: requests, y: mean context
    CPU_ATTENTION = "cpu_attention"  # likewise
    GRAPH_LINEAR = "graph_linear"  # as the stages without "graph", in an iteration that is launched at once
    GRAPH_HEAD = "graph_head"
    GRAPH_HAND_OFF = "graph_hand_off"
    GRAPH_GPU_ATTENTION = "graph_gpu_attention"

    @classmethod
    def attention_at(cls, place: Place, in_graphs: bool = False) -> "Stage":
        """Return the stage of decode attention over KV in a place."""
        return cls(f"{'graph_' if in_graphs else ''}{place.label}_attention")

    @property
    def place(self) -> Place | None:
        """Where the KV of decode attention lies; None: it is another stage."""
        label = self.value.removeprefix("graph_").removesuffix("_attention")
        return next((place for place in PLACES if place.label == label), None)

    @property
    def is_attention(self) -> bool:
        """Whether its time depends on the layer's window."""
        return self.is_prefill or self.place is not None

    @property
    def is_in_graphs(self) -> bool:
        """Whether it is one of a graph."""
        return self in _IN_GRAPHS

    @property
    def is_prefill(self) -> bool:
        """Whether it is a prompt chunk's attention."""
        return self in (Stage.FIRST_CHUNK_ATTENTION, Stage.LATER_CHUNK_ATTENTION)


_IN_GRAPHS = (Stage.GRAPH_LINEAR, Stage.GRAPH_HEAD, Stage.GRAPH_HAND_OFF, Stage.GRAPH_GPU_ATTENTION)
_TIMED_ON_CPU = (Stage.HEAD, Stage.TRANSFER, Stage.CPU_ATTENTION)  # since it waits for the GPU


@dataclass(frozen=True, slots=True)
class Point:
    """A stage at one size; see `Stage` for what x and y count."""

    stage: Stage
    x: int
    y: int = 1

    @property
    def work(self) -> int:
        """What its time is nearly proportional to where it is large."""
        return self.x * self.y


@dataclass(frozen=True, slots=True)
class _Region:
    """The blocks of a pool that measurements use, the same in a few of its layers."""

    pool: KVPool
    layers: tuple[int, ...]
    order: Sequence[int]  # the blocks, their runs shuffled


class StageTimer:
    """Prepares and times stages of one iteration; one layer of those that every layer has.

    The KV pools of `storage` are used where they lie (whatever they held is lost), so this must happen before
    the first request. A pool that the policy does not have is imitated by a small one.

    Args:
        streams: what the work on the decoder's device runs on; None: on the whole of it.
    """

    graph_rows = 0  # decodes of a sub-batch that graphs take; 0: there are none

    def __init__(
        self, decoder: Decoder, storage: KVStorage, limits: SchedulerLimits, streams: Streams | None = None
    ) -> None:
        self._decoder = decoder
        self._stages = Stages(decoder)
        self._streams = streams or WholeDevice(decoder.device)
        self._config = decoder.config
        self.is_cuda = decoder.device.type == "cuda"
        if self.is_cuda and ladder.rung("graphs") != "eager":
            self.graph_rows = min(MAX_DECODES, limits.max_batch_requests)
        self._regions = {
            place: _region(decoder, storage, place, memory_of(place, decoder.device)) for place in PLACES
        }
        # Whether decode attention is the same in all places: the same kind of memory and dtype.
        kinds = {(region.pool.kind, region.pool.dtype) for region in self._regions.values()}
        self.attends_alike = not self.is_cuda and len(kinds) == 1
        generator = torch.Generator(decoder.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=decoder.device, dtype=decoder.dtype)

        config, rows = self._config, max(limits.max_batch_tokens, MIN_ROWS)
        self._hidden = normal(rows, config.hidden_size)
        self._q = normal(rows, config.num_heads, config.head_dim)
        self._k = normal(rows, config.num_kv_heads, config.head_dim)
        self._v = normal(rows, config.num_kv_heads, config.head_dim)
        self._backend = open_backend(self._streams)
        row_shape = config.num_kv_heads, config.head_dim
        self._transfers = TransferMemory(config.num_layers, row_shape, decoder.dtype, decoder.device)
        self._random = random.Random(0)
        # An engine that has run for a while uses the memory of intermediate results again. Until malloc has
        # seen a large piece freed, every such piece is new from the system, page fault by page fault.
        torch.empty(FREED_BYTES, dtype=torch.uint8).zero_()

    def capacity_tokens(self, place: Place) -> int:
        """Return how many tokens' KV the attention of one layer can be measured over."""
        region = self._regions[place]
        return len(region.order) * BLOCK_SIZE

    @torch.inference_mode()
    def time_ms(self, point: Point, turn: int) -> float:
        """Measure a point once, in milliseconds.

        Args:
            point: what to measure.
            turn: number of this measurement; decides which layer and which blocks are used.

        Raises:
            torch.OutOfMemoryError: the GPU has not enough memory left for it.
            StreamMemoryError, RelayStalledError: the CPU cannot attend within graphs.
        """
        if point.stage in (Stage.HAND_OFF, Stage.GRAPH_HAND_OFF):
            return self._hand_off_ms(point.x, in_graph=point.stage.is_in_graphs)
        call = self._prepare(point, turn)
        if point.stage.is_in_graphs:
            return graph_ms(call, LAYERS_AT_ONCE, self._streams.timing_stream())
        if self.is_cuda and point.stage not in _TIMED_ON_CPU:
            return _gpu_ms(call, LAYERS_AT_ONCE)
        if self.is_cuda:
            torch.cuda.synchronize(self._decoder.device)
        start = time.perf_counter()
        call(0)
        if self.is_cuda:
            torch.cuda.synchronize(self._decoder.device)
        return (time.perf_counter() - start) * 1e3

    def close(self) -> None:
        """End the backend's threads."""
        self._backend.close()

    @torch.inference_mode()
    def iteration_ms(self) -> float:
        """Measure once what a sub-batch costs before its first layer: its tensors, embedding, rotation."""
        device = self._decoder.device
        start = time.perf_counter()
        tensor = torch.tensor([0] * 8, dtype=torch.int64, device=device)
        self._stages.embed(tensor, tensor, self._state(8))
        if self.is_cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    def graph_iteration_ms(self) -> float:
        """Measure once what a graph costs before its first layer."""
        return launch_ms(self._decoder.device, self._streams.timing_stream())

    def _hand_off_ms(self, requests: int, *, in_graph: bool) -> float:
        """One round trip of a layer's q, k, v and output, without the attention."""
        config = self._config
        row_elements = (config.qkv_rows + config.num_heads * config.head_dim) // 2  # on average of both ways
        hand_off = HandOff(self._decoder.device, self._backend, in_graph=in_graph)
        return hand_off.seconds(requests * row_elements * self._decoder.dtype.itemsize) * 1e3

    def _prepare(self, point: Point, turn: int) -> Callable[[int], object]:
        """Return what is to be timed; it takes the number of the layer, counted from that of this turn."""
        makers: dict[Stage, Callable[[], Callable[[int], object]]] = {
            Stage.LINEAR: lambda: self._linear(self._stages, point.x, turn, None),
            Stage.HEAD: lambda: self._head(point.x),
            Stage.TRANSFER: lambda: self._transfer(point.x, turn),
            Stage.FIRST_CHUNK_ATTENTION: lambda: self._prefill(point.x, point.y, turn),
            Stage.LATER_CHUNK_ATTENTION: lambda: self._prefill(point.x, point.y, turn),
            Stage.GRAPH_LINEAR: lambda: self._fused_linear(point.x, turn),
            Stage.GRAPH_HEAD: lambda: self._greedy_head(point.x),
        }
        place = point.stage.place
        if place is not None:
            return self._decode(place, point.x, point.y, turn)
        return makers[point.stage]()

    def _linear(self, stages: Stages, tokens: int, turn: int, store: Store | None) -> Callable[[int], object]:
        state = self._state(tokens)
        positions = torch.arange(tokens, device=self._decoder.device)
        stages.embed(torch.zeros_like(positions), positions, state)
        state.residual.copy_(self._hidden[:tokens])
        state.attention.copy_(self._q[:tokens])

        def call(step: int) -> None:
            layer = (turn * LAYERS_AT_ONCE + step) % self._config.num_layers
            stages.pre_attention(layer, state, store)
            stages.post_attention(layer, state)

        return call

    def _fused_linear(self, tokens: int, turn: int) -> Callable[[int], object]:
        """As in a graph of decodes; KV is stored nowhere."""
        slots = torch.full((tokens,), -1, dtype=torch.int32, device=self._decoder.device)
        cache = self._q.new_empty(1, 1, self._config.num_kv_heads, self._config.head_dim)
        return self._linear(Stages(self._decoder, dispatch), tokens, turn, Store(slots, cache, cache))

    def _state(self, tokens: int) -> State:
        of = self._config, tokens, self._decoder.dtype, self._decoder.device
        return State.empty(*of, Scratch.empty(*of))

    def _greedy_head(self, rows: int) -> Callable[[int], object]:
        logits = self._logits(rows)
        return lambda _: logits().max(dim=-1)

    def _logits(self, rows: int) -> Callable[[], Tensor]:
        state = self._state(rows)
        state.residual.copy_(self._hidden[:rows])
        state.x.zero_()
        normed, room = state.scratch.normed, state.x.new_empty(rows, self._config.vocab_size)

        def compute() -> Tensor:
            self._stages.final_norm(state, normed)
            return self._stages.logits(normed, room).float()

        return compute

    def _head(self, rows: int) -> Callable[[int], object]:
        params = SamplingParams(temperature=0.0)
        no_tokens = IntArray().view()
        inputs = [SamplingInput(params, 0, 0, row, no_tokens, no_tokens) for row in range(rows)]
        logits = self._logits(rows)
        return lambda _: sample(logits(), inputs)

    def _transfer(self, tokens: int, turn: int) -> Callable[[int], object]:
        """The KV of `tokens` tokens in whole blocks, others each time; one way and next time the other."""
        places = PLACES if turn % 2 == 0 else PLACES[::-1]
        regions = [self._regions[place] for place in places]
        num_blocks = min(-(-tokens // BLOCK_SIZE), *(len(region.order) for region in regions))
        blocks = zip(*(_some(region, num_blocks, turn) for region in regions), strict=True)
        storage = KVStorage({place: self._regions[place].pool for place in places})
        copies = [BlockCopy(places[0], source, places[1], target) for source, target in blocks]
        layer = regions[0].layers[turn % len(regions[0].layers)]
        self._transfers.begin()
        moves = Moves(storage.copy_groups(copies), self._transfers)

        def record(recorder: Recorder) -> None:
            recorder.wait(moves.submit(recorder, layer))

        def carry_out(_: int) -> None:
            with self._backend.on_device():
                self._backend.start(SmallProgram("transfer", record), with_flags=False, with_graphs=False)
                self._backend.wait()

        return carry_out

    def _prefill(self, tokens: int, context_len: int, turn: int) -> Callable[[int], object]:
        region = self._regions[NEAR]
        (table,) = self._tables(region, [context_len], turn)
        slots = slots_of(table, np.arange(context_len), BLOCK_SIZE)
        chunk = Prefill(
            slice(0, tokens), context_len - tokens, upload(slots, torch.int64, region.pool.device)
        )
        prompts = DevicePrompts(region.pool, [chunk])
        q, k, v = self._q[:tokens], self._k[:tokens], self._v[:tokens]
        out = torch.empty_like(q)
        return self._in_layers(region, turn, lambda layer, *how: prompts.attend(layer, q, k, v, out, *how))

    def _decode(self, place: Place, requests: int, mean_context: int, turn: int) -> Callable[[int], object]:
        region = self._regions[place]
        device, lens = region.pool.device, self._context_lens(requests, mean_context)
        tables = self._tables(region, lens, turn)
        last = np.array([length - 1 for length in lens])
        slots = [
            int(slots_of(table, end, BLOCK_SIZE)[0]) for table, end in zip(tables, last[:, None], strict=True)
        ]
        new_slots, block_tables, context_lens = (
            upload(slots, torch.int64, device),
            upload(padded_block_tables(tables), torch.int32, device),
            upload(lens, torch.int32, device),
        )
        q, k, v = (tensor[:requests].to(device) for tensor in (self._q, self._k, self._v))
        out = torch.empty_like(q)

        def attend(layer: int, scale: float, window: int | None) -> None:
            cache = region.pool.layer(layer)
            new_k, new_v = (None, None) if cache.stores_early else (k, v)
            cache.decode(q, new_k, new_v, new_slots, block_tables, context_lens, out, scale, window)

        return self._in_layers(region, turn, attend)

    def _tables(self, region: _Region, context_lens: Sequence[int], turn: int) -> list[IntView]:
        """Block tables of requests, each on runs of its own, as `BlockPool` hands them out."""
        widths = [-(-context_len // BLOCK_SIZE) for context_len in context_lens]
        taken = [-(-width // BLOCKS_PER_RUN) * BLOCKS_PER_RUN for width in widths]
        if sum(taken) > len(region.order):
            taken = widths  # once no run is idle, every block is for anybody
        blocks = _some(region, sum(taken), turn)
        tables = [IntArray(islice(blocks, count)).view() for count in taken]
        return [table[:width] for table, width in zip(tables, widths, strict=True)]

    def _in_layers(
        self, region: _Region, turn: int, attend: Callable[[int, float, int | None], None]
    ) -> Callable[[int], object]:
        config = self._config

        def call(step: int) -> None:
            layer = region.layers[(turn + step) % len(region.layers)]
            attend(layer, config.attention_scale, config.layer_windows[layer])

        return call

    def _context_lens(self, requests: int, mean_context: int) -> list[int]:
        """Contexts between half and one and a half times their mean: requests are never all alike."""
        if requests == 1:
            return [mean_context]
        shares = [0.5 + self._random.random() for _ in range(requests)]
        factor = mean_context * requests / sum(shares)
        return [max(round(share * factor), 1) for share in shares]


def _some(region: _Region, num_blocks: int, turn: int) -> Iterator[int]:
    """Blocks of a region, as often as it takes; those of one turn follow those of another."""
    first = turn * num_blocks % len(region.order)
    return islice(cycle(region.order), first, first + num_blocks)


def measured_blocks(decoder: Decoder, storage: KVStorage, place: Place) -> int:
    """Return how many blocks of a place measurements use in each layer; 0 without such a pool."""
    pool = storage.get(place)
    if pool is None:
        return 0
    bytes_per_block = block_bytes(decoder.config, BLOCK_SIZE, pool.dtype)
    num_runs = max(_region_bytes(decoder, pool.device) // (BLOCKS_PER_RUN * bytes_per_block), 1)
    return min(pool.num_blocks, num_runs * BLOCKS_PER_RUN)


def _region(decoder: Decoder, storage: KVStorage, place: Place, device: torch.device) -> _Region:
    """Choose layers and blocks of a place's pool, or of one made for the purpose, and write to them.

    Memory that was never written is read from one shared page of zeros: that would be a cache's speed.
    """
    config, region_bytes = decoder.config, _region_bytes(decoder, device)
    num_blocks = measured_blocks(decoder, storage, place)
    if num_blocks:
        pool = storage[place]
    else:
        bytes_per_block = config.num_layers * block_bytes(config, BLOCK_SIZE, decoder.dtype)
        num_runs = min(max(region_bytes // 4 // (BLOCKS_PER_RUN * bytes_per_block), 1), 1024)
        num_blocks = num_runs * BLOCKS_PER_RUN
        pool = KVPool(config, num_blocks, BLOCK_SIZE, decoder.dtype, device)
    num_layers = max(region_bytes // (num_blocks * block_bytes(config, BLOCK_SIZE, pool.dtype)), 1)
    if len(set(config.layer_windows)) > 1:
        num_layers = max(num_layers, 8)  # layers of both kinds, in about their proportion
    num_layers = min(num_layers, config.num_layers)
    layers = tuple(i * config.num_layers // num_layers for i in range(num_layers))
    rows = torch.zeros(ROWS_AT_ONCE, config.num_kv_heads, config.head_dim, dtype=decoder.dtype, device=device)
    for layer in layers:
        for slots in torch.split(torch.arange(num_blocks * BLOCK_SIZE, device=device), ROWS_AT_ONCE):
            pool.layer(layer).write(rows[: len(slots)], rows[: len(slots)], slots)
    firsts = range(0, num_blocks, BLOCKS_PER_RUN)
    order = [
        block
        for first in random.Random(0).sample(firsts, len(firsts))
        for block in range(first, min(first + BLOCKS_PER_RUN, num_blocks))
    ]
    return _Region(pool, layers, order)


def _region_bytes(decoder: Decoder, device: torch.device) -> int:
    """Several times what caches hold; less for a toy, for whose sake nobody should wait."""
    if device.type == "cuda":
        return GPU_REGION_BYTES
    wanted = min(max(3 * last_level_cache_bytes(), MIN_HOST_REGION_BYTES), MAX_HOST_REGION_BYTES)
    return min(wanted, max(decoder.nbytes, TOY_REGION_BYTES))


def _gpu_ms(call: Callable[[int], object], repeats: int) -> float:
    """The time of one call among `repeats` that follow each other without waiting."""
    start, end = timed_event(), timed_event()
    torch.cuda.synchronize()
    start.record()
    for step in range(repeats):
        call(step)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats
