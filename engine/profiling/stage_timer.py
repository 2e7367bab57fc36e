"""Times single stages of an iteration on the loaded model, for the profiler's tables and for benchmarks.

Each measurement uses different memory from the one before: another layer's weights, other KV blocks. In an
iteration, data also comes from memory and not from a cache filled by the previous repetition.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.batch import SamplingInput
from neo_desktop.engine.cuda.copies import host_memory, upload
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.backend import Backend, open_backend
from neo_desktop.engine.execute.build_program import padded_block_tables
from neo_desktop.engine.execute.host import Relays
from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal, Work
from neo_desktop.engine.execute.layout import MAX_DECODES
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls
from neo_desktop.engine.execute.part import Record
from neo_desktop.engine.execute.prefill import Prefill
from neo_desktop.engine.execute.prompts import DevicePrompts
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, timed_event
from neo_desktop.engine.execute.timeline import Stage as LaneStage
from neo_desktop.engine.execute.transfers import HostTransfer
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kernels.dispatch import fits_graph
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.profiling.copy_timer import CopyTimer
from neo_desktop.engine.profiling.offload import OffloadTimer
from neo_desktop.engine.profiling.points import NEAR, Point, Stage
from neo_desktop.engine.profiling.regions import Region, choose_region
from neo_desktop.engine.profiling.shares import measured_shares
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.recurrent import decode_batch, fresh_batch
from neo_desktop.models.registry import stages_of
from neo_desktop.models.stages import Scratch, State

LAYERS_AT_ONCE = 4  # on a GPU: queued work hides the launch of the first kernel
MIN_ROWS = 32  # a grid has at least two points per axis, at any limits;
FREED_BYTES = 31 * 1024**2  # nearly the largest size that glibc's malloc learns to keep
FEW_ROWS = 8
TIMEOUT_S = 60.0  # covers a few layers; a graph reports no progress within

_TIMED_ON_CPU = (Stage.HEAD, Stage.CPU_ATTENTION)  # wall-clock time: the stage waits for the GPU
_MEASURED = LaneStage("measured", 0, NO_SUB_BATCH, 0)


class StageTimer:
    """Prepares and times the stages of one iteration, for one layer if all layers have the stage.

    On a GPU, stages that iterations run in graphs are timed in a graph, where launches are free: linear
    stages, decode attention, and the round trip to the CPU if flags signal it. Prefill attention and
    transfers are launched, as are linear stages of many rows with offloaded weights. The head covers the last
    hidden states to the tokens; iterations of greedy requests alone save its launches with a graph.

    The timer uses the KV pools of `storage` in place and overwrites them, so it must run before the first
    request. A small pool stands in for a pool that the policy lacks.

    Args:
        streams: CUDA streams for the decoder's device; None: the whole device.
        gpu: replaces the GPU in tests.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        limits: SchedulerLimits,
        streams: Streams | None = None,
        gpu: Backend | None = None,
    ) -> None:
        self._decoder = decoder
        self._config = decoder.config
        self.is_cuda = decoder.device.type == "cuda"
        self._uses_gpu = self.is_cuda or gpu is not None
        self._stages = stages_of(decoder, dispatch if self._uses_gpu else None)
        self._backend = gpu or open_backend(streams or Streams(decoder.device))
        self._regions = {tier: choose_region(decoder, storage, tier) for tier in MEASURED_TIERS}
        # True if decode attention is equal in all tiers: the same kind of memory and dtype.
        kinds = {(region.pool.kind, region.pool.dtype) for region in self._regions.values()}
        self.attends_alike = not self.is_cuda and len(kinds) == 1
        generator = torch.Generator(decoder.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=decoder.device, dtype=decoder.dtype)

        config, rows = self._config, max(limits.max_batch_tokens, MIN_ROWS)
        self._hidden = normal(rows, config.carried_width)
        self._q = normal(rows, config.num_heads, config.head_dim)
        self._kv = normal(2, rows, config.num_kv_heads, config.head_dim)
        # On a GPU the layers' copies run back to back; elsewhere one layer stands for all.
        num_layers = config.num_layers if self._uses_gpu else 1
        self.copies = CopyTimer(decoder, self._regions, self._kv, self.run, num_layers)
        self._split = OffloadedMatmuls(self._stages, (FEW_ROWS,)) if decoder.has_splits else None
        # The CPU's part in a layer's linear stages, one value per measurement.
        self.host_linear_ms: dict[Point, list[float]] = {}
        self._random = random.Random(0)
        # A running engine reuses the memory of intermediate results. Until malloc has seen a large piece
        # freed, it gets each large piece new from the system, with page faults.
        torch.empty(FREED_BYTES, dtype=torch.uint8).zero_()

    def capacity_tokens(self, tier: KVTier) -> int:
        """Return how many tokens the measured attention of one layer can cover."""
        return self._regions[tier].num_tokens

    def close(self) -> None:
        """Stop the backend's threads."""
        self._backend.close()

    @torch.inference_mode()
    def time_ms(self, point: Point, turn: int) -> float:
        """Measure a point once, in milliseconds.

        Args:
            point: stage and size.
            turn: number of this measurement; it selects the layer and the blocks.

        Raises:
            torch.OutOfMemoryError: the GPU has too little free memory.
            StreamMemoryError, RelayStalledError: flags do not work on this GPU.
        """
        if point.stage is Stage.OFFLOAD:
            return self._offload_ms(point.x)
        if point.stage is Stage.TRANSFER:
            return self.copies.transfer_ms(point.x, turn, with_flags=self._has_flags)
        if point.stage is Stage.SWAP:
            return self.copies.swap_ms(point.x, turn)
        if point.stage is Stage.LINEAR and self._split is not None:
            ms, host_ms = self.offloaded_linear_ms(point.x)
            self.host_linear_ms.setdefault(point, []).append(host_ms)
            return ms
        if point.stage.tier is not None:
            call = self._decode(point.stage.tier, point.x, point.y, turn)
        elif point.stage.is_prefill:
            call = self._prefill(point.x, point.y, turn)
        else:
            call = self._linear(point.x, turn) if point.stage is Stage.LINEAR else self._head(point.x)
        if self._uses_gpu and point.stage not in _TIMED_ON_CPU:
            return self._on_gpu_ms(call, self._is_graph(point))
        self._synchronize()
        start = time.perf_counter()
        call(0)
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    @torch.inference_mode()
    def measure_shares(self, max_rows: int, seconds: float) -> None:
        """Find and set the best division of offloaded matrices, then of experts in host memory.

        Args:
            max_rows: of a matmul.
            seconds: approximate duration.
        """
        assert self._split is not None
        split, decoder = self._split, self._decoder
        kinds = {"streamed_shares": bool(split.splits), "streamed_experts": bool(split.moe_layers)}
        for name in (name for name, is_there in kinds.items() if is_there):

            def ms(tokens: int, shares: StreamedShares, name: str = name) -> float:
                setattr(decoder, name, shares)
                return self.offloaded_linear_ms(tokens)[0]

            setattr(decoder, name, measured_shares(ms, max_rows, seconds / sum(kinds.values())))

    @torch.inference_mode()
    def iteration_ms(self) -> float:
        """Measure an iteration's time outside its layers once: inputs, embedding, launches, completion."""
        device, state = self._decoder.device, self._state(FEW_ROWS)
        staged = host_memory(lambda pin: torch.zeros(FEW_ROWS, dtype=torch.int32, pin_memory=pin), device)
        inputs = torch.empty_like(staged, device=device)

        def begin() -> None:
            inputs.copy_(staged, non_blocking=True)
            self._stages.embed(inputs, inputs, state)

        with self.run(partial(_in_a_row, [begin]), in_graph=self._has_graphs) as seconds:
            return seconds * 1e3

    @property
    def _has_graphs(self) -> bool:
        return self._uses_gpu and self._stages.writes_in_place and fallbacks.level("graphs") != "eager"

    @property
    def _has_flags(self) -> bool:
        return self._uses_gpu and fallbacks.level("graphs") == "host-flags"

    def _is_graph(self, point: Point) -> bool:
        """True if iterations run this point in a graph."""
        if point.stage.is_prefill or not self._has_graphs:
            return False
        heads = self._config.num_kv_heads, self._config.head_dim
        return point.stage is Stage.LINEAR or fits_graph(point.x, *heads, 2 * point.y)

    def _synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self._decoder.device)

    def _on_gpu_ms(self, call: Callable[[int], object], in_graph: bool) -> float:
        """Return the time per call of consecutive calls without waits between them."""
        start, end = timed_event(in_graph=in_graph), timed_event(in_graph=in_graph)
        calls = [partial(call, step) for step in range(LAYERS_AT_ONCE)]
        with self.run(partial(_in_a_row, [start.record, *calls, end.record]), in_graph=in_graph):
            return float(start.elapsed_time(end)) / LAYERS_AT_ONCE

    @contextmanager
    def run(
        self,
        record: Record,
        *,
        in_graph: bool = False,
        relays: Relays | None = None,
        transfers: Sequence[HostTransfer] = (),
        products: Sequence[HostWork] = (),
    ) -> Iterator[float]:
        """Run a program; yield the seconds until its end was observed.

        Args:
            relays: run the CPU's part; None: threads run it.
            transfers: the CPU's copies.
            products: the CPU's matmuls.
        """
        program, backend = SmallProgram("measured", record), self._backend
        try:
            for _ in range(3 if in_graph else 1):  # at once, captured, and launched again
                watch = Watchdog(TIMEOUT_S)
                for product in products:
                    product.busy_ns = 0
                backend.begin(watch)
                self._synchronize()
                start = time.perf_counter()
                if relays is not None:
                    relays.start(products, transfers, watch)
                with backend.on_device():
                    backend.start(program, with_flags=relays is not None, with_graphs=in_graph)
                backend.wait()
                if relays is not None:
                    relays.finish(None)
                seconds = time.perf_counter() - start
            yield seconds
        except BaseException as error:
            if relays is not None:
                relays.break_off()  # the GPU may wait for them
            backend.abandon(error)
            raise
        finally:
            backend.forget()
            if relays is not None:
                relays.close()

    def _offload_ms(self, requests: int) -> float:
        """Measure one round trip of a layer's q, k, v and output, without the attention."""
        config = self._config
        row_elements = (config.qkv_rows + config.num_heads * config.head_dim) // 2  # mean of both directions
        offload = OffloadTimer(self._decoder.device, self._backend, in_graph=self._has_flags)
        return offload.seconds(requests * row_elements * self._decoder.dtype.itemsize) * 1e3

    def _linear(self, tokens: int, turn: int) -> Callable[[int], object]:
        device, state, region = self._decoder.device, self._state(tokens), self._regions[NEAR]
        self._fill(state, tokens)
        slots = region.slots(tokens, turn).to(device, torch.int32)

        def call(step: int) -> None:
            layer = (turn * LAYERS_AT_ONCE + step) % self._config.num_layers
            cache = region.pool.layer(region.layer(turn + step))
            store = cache.store(slots) if cache.fused_kv_append else None
            self._stages.advance(layer, layer, state, store)

        return call

    @torch.inference_mode()
    def offloaded_linear_ms(self, tokens: int) -> tuple[float, float]:
        """Return the mean times of a layer's linear stages, and of the CPU's part in them.

        All layers run, because they differ in their resident weights.
        """
        assert self._split is not None
        num_layers, state = self._config.num_layers, self._state(tokens)
        products = self._split.of_rows(0, tokens, range(num_layers + 1))
        # Without flags, threads do the CPU's part, and no graph contains them.
        in_graph = self._has_graphs and tokens <= MAX_DECODES and (self._has_flags or not products.on_host)
        start, end = (timed_event(in_graph=in_graph) if self.is_cuda else None for _ in range(2))
        self._fill(state, tokens)

        def record(launcher: Launcher) -> None:
            stream = products.stream()
            after: Sequence[Signal] = ()
            stream.bring(launcher)
            if start is not None:
                launcher.run(Lane.DEVICE, _MEASURED, start.record)
            for turn in range(num_layers + 1):
                begun = turn if turn < num_layers else None
                steps = self._stages.steps(turn - 1 if turn else None, begun, state)
                stage = LaneStage("linear", turn, NO_SUB_BATCH, tokens)
                after = products.advance(launcher, stream, stage, steps, after)
            launcher.wait(after)
            if end is not None:
                launcher.run(Lane.DEVICE, _MEASURED, end.record)

        relays = Relays(self._config, KVStorage({})) if self._has_flags else None
        hosts, staged = products.on_host, products.stream().staged
        works = hosts if staged is None else [*hosts, staged]
        with self.run(record, in_graph=in_graph, relays=relays, products=works) as seconds:
            ms = seconds * 1e3 if start is None or end is None else float(start.elapsed_time(end))
            return ms / num_layers, sum(host.busy_ns for host in hosts) / 1e6 / num_layers

    def _state(self, tokens: int) -> State:
        of = self._config, tokens, self._decoder.dtype, self._decoder.device
        state, shapes = State.empty(*of, Scratch.empty(*of)), self._config.state_shapes
        if shapes:
            batch = decode_batch if tokens <= MAX_DECODES else fresh_batch
            state.recurrent = batch(tokens, shapes, self._decoder.device)
        return state

    def _fill(self, state: State, tokens: int) -> None:
        positions = torch.arange(tokens, dtype=torch.int32, device=self._decoder.device)
        positions %= self._config.max_context_tokens  # learned positions end there
        self._stages.embed(torch.zeros_like(positions), positions, state)
        state.residual.copy_(self._hidden[:tokens])
        state.attention.copy_(self._q[:tokens])

    def _head(self, rows: int) -> Callable[[int], object]:
        params, no_tokens = SamplingParams(temperature=0.0), IntArray().view()
        inputs = [SamplingInput(params, 0, 0, row, no_tokens, no_tokens) for row in range(rows)]
        state = self._state(rows)
        state.residual.copy_(self._hidden[:rows])
        state.x.zero_()
        normed, room = state.scratch.normed, state.x.new_empty(rows, self._config.vocab_size)

        def call(_: int) -> None:
            self._stages.final_norm(state, normed)
            sample(self._stages.logits(normed, room).float(), inputs)

        return call

    def _prefill(self, tokens: int, context_len: int, turn: int) -> Callable[[int], object]:
        region = self._regions[NEAR]
        slots = region.slots(context_len, turn).to(region.pool.device)
        chunk = Prefill(slice(0, tokens), context_len - tokens, slots)
        prompts = DevicePrompts(region.pool, [chunk])
        q, kv = self._q[:tokens], self._kv[:, :tokens]
        out = torch.empty_like(q)

        def attend(layer: int, scale: float, window: int | None) -> None:
            cache = region.pool.layer(layer)
            prompts.attend(layer, q, kv, out, scale, window, cache.sinks, cache.softcap)

        return self._in_layers(region, turn, attend)

    def _decode(self, tier: KVTier, requests: int, mean_context: int, turn: int) -> Callable[[int], object]:
        region = self._regions[tier]
        device, lens = region.pool.device, self._context_lens(requests, mean_context)
        tables = region.tables(lens, turn)
        block_tables = upload(padded_block_tables(tables), torch.int32, device)
        context_lens = upload(lens, torch.int32, device)
        q, k, v = (tensor[:requests].to(device) for tensor in (self._q, *self._kv))
        out = torch.empty_like(q)

        def attend(layer: int, scale: float, window: int | None) -> None:
            cache = region.pool.layer(layer)
            new_k, new_v = (None, None) if cache.fused_kv_append else (k, v)
            cache.decode(q, new_k, new_v, None, block_tables, context_lens, out, scale, window)

        return self._in_layers(region, turn, attend)

    def _in_layers(
        self, region: Region, turn: int, attend: Callable[[int, float, int | None], None]
    ) -> Callable[[int], object]:
        config = self._config

        def call(step: int) -> None:
            layer = region.layer(turn + step)
            attend(layer, config.attention_scale, config.layer_windows[layer])

        return call

    def _context_lens(self, requests: int, mean_context: int) -> list[int]:
        """Return contexts from half to one and a half times the mean: real requests differ."""
        if requests == 1:
            return [mean_context]
        shares = [0.5 + self._random.random() for _ in range(requests)]
        factor = mean_context * requests / sum(shares)
        return [max(round(share * factor), 1) for share in shares]


def _in_a_row(work: Sequence[Work], launcher: Launcher) -> None:
    """Add the work to the device's lane."""
    for each in work:
        launcher.run(Lane.DEVICE, _MEASURED, each)
