"""Carries out plans of decodes alone as graphs, and all others by the pipeline."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from neo_desktop.engine.batch import (
    GraphReach,
    IterationPlan,
    IterationResult,
    IterationTiming,
    SampledToken,
    SamplingInput,
    ScheduledSequence,
)
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.cuda.errors import (
    DeviceStalledError,
    EngineLostError,
    StageStalledError,
    StreamMemoryError,
    device_lost,
    is_device_lost,
    is_lost,
    is_out_of_memory,
)
from neo_desktop.engine.cuda.streams import Streams, WholeDevice
from neo_desktop.engine.execute.attention import padded_block_tables
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.graphs.bucket import MIN_BLOCKS, Bucket, Most, Rows
from neo_desktop.engine.execute.graphs.program import DecodeProgram
from neo_desktop.engine.execute.graphs.streams import Runner
from neo_desktop.engine.execute.graphs.workspace import SubBatchMemory, Workspace
from neo_desktop.engine.execute.pipeline import PipelineExecutor, result_of
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kernels.dispatch import fits_graph, programs_per_sm
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.placement import Place
from neo_desktop.engine.sampler import NO_TOKEN, is_plain, start_sampling
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Patience
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Stages
from neo_desktop.native.relay import Relay, RelayBatch, RelayStalledError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# See `Patience`. The GPU is waited for twice as long: the relay's guard comes first, and lets it go on.
PATIENCE_S = DEFAULT_PATIENCE.least_s
PATIENCE_FACTOR = DEFAULT_PATIENCE.factor
PAUSE_ITERATIONS = 500  # without graphs, once there was no room for one: another program may need the memory


class HandOverStalledError(RuntimeError):
    """The GPU went on only when all flags were raised that it may wait for."""


class GraphExecutor(Executor):
    """Runs plans on a GPU and the CPU beside it.

    `start` and what it returns are called by one thread, `close` by any.

    Args:
        model: gives the weights.
        storage: holds the KV.
        most: the largest bucket; what is larger is left to the pipeline.
        num_sms: of the GPU.
        runner: of the graphs.
        pipeline: carries out what is not decodes alone; closed with this executor.
        timeline: the pipeline's.
        streams: the pipeline's, too; None: the whole device's.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        most: Most,
        num_sms: int,
        runner: Runner,
        pipeline: PipelineExecutor,
        *,
        timeline: Timeline | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._model = model
        self._most = most
        self._runner = runner
        self._pipeline = pipeline
        self._timeline = timeline
        self._streams = streams or WholeDevice(model.device)
        with self._streams.on_device():
            k_caches, v_caches = self._caches = _caches(model, storage)
            q = k_caches.new_empty(1, model.config.num_heads, model.config.head_dim)
            num_programs = num_sms * programs_per_sm(q, k_caches[0], v_caches[0])
            self._workspace = Workspace(model.config, model.dtype, model.device, most, num_programs)
        self._stages = Stages(model, dispatch)
        host = storage.get(Place.HOST)
        self._block_size = storage.block_size
        self._relay = _relay(model, host) if host and ladder.rung("graphs") == "host-flags" else None
        self._stalled_relay: Relay | None = None
        self._programs: dict[Bucket, DecodeProgram] = {}
        self._pause = 0  # iterations for which graphs are not tried
        self._ladder_changes = ladder.changes  # when the graphs were captured
        self._is_closed = False
        self._lost: EngineLostError | None = None

    @property
    def fits_graphs(self) -> bool:
        """Whether the memory is such that a GPU's graphs can use it: pinned, where it is the host's."""
        return self._workspace.fits_graphs

    def warm_up(self) -> None:
        """Compile all kernels, which takes seconds, by iterations in which nobody decodes."""
        # Contexts are cut most where one request is long, and least where many are short. No kernel has more
        # variants than these two: without merging and with it.
        most = self._most
        buckets = dict.fromkeys(
            (Bucket((Rows(1, 0),), most.blocks), Bucket((Rows(most.rows, 0),), MIN_BLOCKS))
        )
        with self._streams.on_device(), torch.inference_mode():
            for bucket in filter(self._fits, buckets):
                program = self._program(bucket)
                for memory in program.memories:
                    self._fill(memory, (), ())
                try:
                    self._runner.start(bucket, program)
                    self._runner.wait()
                except RuntimeError as error:
                    self._step_down(error)
                    return

    def start(self, plan: IterationPlan) -> Wait:
        """See `Executor`."""
        lost = self._lost or self._pipeline.lost
        if lost is not None:
            raise lost.with_traceback(None)
        bucket = self._bucket_of(plan)
        if self._pause > 0 or bucket is None:
            self._pause = max(self._pause - 1, 0)
            return self._pipeline.start(plan)
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        if self._ladder_changes != ladder.changes:  # graphs hold kernels as they were chosen
            self._ladder_changes = ladder.changes
            self._runner.forget()
        try:
            wait = self._attempt(lambda: self._submit(plan, self._program(bucket)))
            return partial(self._end, plan, wait)
        except RuntimeError as error:
            self._step_down(error)
        return self._pipeline.start(plan)

    def _end(self, plan: IterationPlan, wait: Wait) -> IterationResult:
        """Wait for an iteration; if it cannot be ended, let the pipeline do it.

        All that was done can be done again: the same KV is written to the same place.
        """
        try:
            return self._attempt(wait)
        except RuntimeError as error:
            self._step_down(error)
        return self._pipeline.execute(plan)

    def _step_down(self, error: RuntimeError) -> None:
        """See to it that the next iteration does without what has failed; raise what nothing else serves for.

        Called where errors are caught: what is raised is the error itself.
        """
        if isinstance(error, (StreamMemoryError, RelayStalledError, HandOverStalledError)):
            ladder.limit("graphs", "device-only", str(error))
            # Its thread may still be in a step that does not end, so that its memory must stay.
            self._stalled_relay, self._relay = self._relay, None
            if self._stalled_relay is not None and not self._stalled_relay.close():
                # Whenever that step goes on, it stores KV in blocks that may be somebody else's by then.
                self._lost = StageStalledError(str(error))
                raise self._lost from error
        elif is_out_of_memory(error):
            self._pause_graphs(error)
        elif isinstance(error, torch.AcceleratorError) and not is_lost(error):
            ladder.limit("graphs", "eager", f"a CUDA graph failed: {str(error).partition(chr(10))[0]}")
            self._runner.forget()
        else:
            raise error

    def _pause_graphs(self, error: RuntimeError) -> None:
        """Free the memory of all graphs, and try none for a while."""
        logger.warning(
            "the GPU has no memory for another graph: the next %d iterations are launched piece by piece, "
            "which is slower (%s)",
            PAUSE_ITERATIONS,
            error,
        )
        self._pause = PAUSE_ITERATIONS
        self._runner.forget()

    def _attempt(self, work: Callable[[], T]) -> T:
        """Do a part of an iteration; when it fails, nothing of the iteration is under way any more."""
        try:
            with self._streams.on_device(), torch.inference_mode():
                return work()
        except BaseException as error:
            stalled: RelayStalledError | None = None
            if self._relay is not None:
                self._relay.cancel()  # it may wait for what no longer comes, and the device for it
                try:
                    self._relay.finish()
                except RelayStalledError as found:  # its step may go on some time, and store KV then
                    stalled = found
                except Exception:
                    logger.debug("the relay's step failed, too", exc_info=True)
            lost = self._settle(error)
            if self._timeline is not None:
                self._timeline.end_iteration(completed=False)
            if lost is not None:
                self._lost = lost
                raise lost from error
            if isinstance(error, DeviceStalledError):  # but it has ended by now
                raise HandOverStalledError(str(error)) from error
            if stalled is not None and isinstance(error, Exception):
                raise stalled from error
            raise

    @property
    def graph_reach(self) -> GraphReach:
        """See `Executor`."""
        if self._pause > 0 or ladder.rung("graphs") == "eager":
            return GraphReach()
        return GraphReach(self._most.rows, self._hands_over)

    @property
    def _hands_over(self) -> bool:
        """Whether the CPU can attend within a graph."""
        return ladder.rung("graphs") == "host-flags" and self._relay is not None

    def _settle(self, error: BaseException) -> EngineLostError | None:
        """Wait until the GPU is idle after an error; return why it never will be, if so."""
        try:
            # A GPU that only waits for flags goes on now.
            if not is_device_lost(error) or isinstance(error, DeviceStalledError):
                self._runner.settle()
                return None
        except RuntimeError as another:
            if not is_device_lost(another):
                raise
            error = another if not isinstance(error, DeviceStalledError) else error
        return device_lost(error)

    def close(self) -> None:
        """End all threads, also in the middle of an iteration, and write the timeline if it has a file."""
        self._is_closed = True
        if self._relay is not None:
            self._relay.cancel()
        if self._lost is None and self._pipeline.lost is None:
            with suppress(RuntimeError):  # whoever waits for what is under way is told
                self._runner.settle()
        self._pipeline.close()

    def _bucket_of(self, plan: IterationPlan) -> Bucket | None:
        """Return the bucket that the plan is carried out in; None: it is the pipeline's."""
        if plan.copies or not all(s.is_decode and not s.num_pooled for s in plan.sequences):
            return None
        with_cpu = any(s.place == Place.HOST for s in plan.sequences)
        if ladder.rung("graphs") == "eager" or (with_cpu and not self._hands_over):
            return None
        bucket = Bucket.of(plan)
        return bucket if bucket in self._most and self._fits(bucket) else None

    def _fits(self, bucket: Bucket) -> bool:
        config, max_tokens = self._model.config, bucket.max_blocks * self._block_size
        return all(
            fits_graph(rows.device, config.num_kv_heads, config.head_dim, max_tokens)
            for rows in bucket.sub_batches
        )

    def _program(self, bucket: Bucket) -> DecodeProgram:
        """Return a bucket's program; each is made once, since its views of the workspace take a while."""
        if bucket not in self._programs:
            self._programs[bucket] = DecodeProgram(
                bucket, self._model.config, self._stages, self._workspace, self._caches, self._block_size
            )
        return self._programs[bucket]

    def _submit(self, plan: IterationPlan, program: DecodeProgram) -> Wait:
        """Start the program and the sampling behind it; return what waits for them."""
        if self._timeline is not None:
            self._timeline.begin_iteration(self._model.device)
        started_ns = time.perf_counter_ns()
        watch = Patience(PATIENCE_S, PATIENCE_FACTOR).watch(plan.predicted.total_ms)
        self._runner.begin(watch)
        memories = program.memories
        parts = [sub_batch.sequences for sub_batch in plan.sub_batches if sub_batch.sequences]
        batches = []
        for memory, sequences in zip(memories, parts, strict=True):
            on_device = [s for s in sequences if s.place == Place.DEVICE]
            on_host = [s for s in sequences if s.place == Place.HOST]
            self._fill(memory, on_device, on_host)
            if on_host:
                batches.append((memory.index, self._relay_batch(memory, on_host)))
        if self._relay is not None and batches:
            self._relay.start([batch for _, batch in batches], watch.patience_s)
            watch.follow(partial(_num_raised, [batch.flags for _, batch in batches]))
        self._runner.start(program.bucket, program)

        first_rows = [0, memories[0].rows.count]
        rows = [
            first_rows[memory.index] + row
            for memory, part in zip(memories, parts, strict=True)
            for row in _rows(memory, part)
        ]
        sampling = [
            (row, sequence.request_id, sequence.sampling)
            for row, sequence in zip(rows, chain.from_iterable(parts), strict=True)
            if sequence.sampling is not None
        ]
        tokens = self._start_sampling([row for row, _, _ in sampling], [inputs for _, _, inputs in sampling])

        def wait() -> IterationResult:
            self._runner.wait()
            cpu_attention_ns = self._finish_relay(batches)
            if self._is_closed:
                raise RuntimeError("the executor was closed in the middle of an iteration")
            chosen = tokens()
            total_ns = time.perf_counter_ns() - started_ns
            timing = IterationTiming(total_ns / 1e6, cpu_attention_ns / 1e6, is_graph=True)
            if self._timeline is not None:
                self._timeline.end_iteration()
            return result_of([name for _, name, _ in sampling], chosen, self._model.dtype, timing)

        return wait

    def _fill(
        self,
        memory: SubBatchMemory,
        on_device: Sequence[ScheduledSequence],
        on_host: Sequence[ScheduledSequence],
    ) -> None:
        """Say what the iteration is about, and that the other rows are padding."""
        staged, first_host_row = memory.staged, memory.rows.device
        token_ids, positions, slots = (x.numpy() for x in (staged.token_ids, staged.positions, staged.slots))
        context_lens, block_tables = staged.context_lens.numpy(), staged.block_tables.numpy()
        token_ids[:], positions[:], slots[:], context_lens[:] = 0, 0, -1, 0
        for first, sequences in ((0, on_device), (first_host_row, on_host)):
            end = first + len(sequences)
            token_ids[first:end] = [s.token_ids[0] for s in sequences]
            positions[first:end] = [s.start for s in sequences]
        block_size, count = self._block_size, len(on_device)
        context_lens[:count] = [s.context_len for s in on_device]
        slots[:count] = [
            s.block_table[s.start // block_size] * block_size + s.start % block_size for s in on_device
        ]
        for row, sequence in zip(block_tables, on_device, strict=False):
            row[: len(sequence.block_table)] = sequence.block_table

    def _relay_batch(self, memory: SubBatchMemory, sequences: Sequence[ScheduledSequence]) -> RelayBatch:
        config, count = self._model.config, len(sequences)
        first_k, first_v = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = memory.hand_over.qkv[:count]
        return RelayBatch(
            q=qkv[:, :first_k],
            k=qkv[:, first_k:first_v],
            v=qkv[:, first_v:],
            out=memory.hand_over.out[:count],
            block_tables=torch.from_numpy(padded_block_tables(sequences)),
            context_lens=torch.tensor([s.context_len for s in sequences], dtype=torch.int32),
            flags=memory.hand_over.flags,
            index=memory.index,
        )

    def _finish_relay(self, batches: Sequence[tuple[int, RelayBatch]]) -> int:
        """Wait until all that was handed over is done; return for how many nanoseconds the CPU attended.

        Args:
            batches: what is handed over, each with the index of its sub-batch.
        """
        if self._relay is None or not batches:
            return 0
        steps = self._relay.finish()
        if self._timeline is not None and self._timeline.is_recording:
            for step in steps:
                index, batch = batches[step.item]
                stage = Stage("CPU attention", step.layer, index, len(batch.q))
                self._timeline.add("cpu", stage, step.start_ns, step.end_ns)
        return sum(step.end_ns - step.start_ns for step in steps)

    def _start_sampling(
        self, rows: list[int], inputs: Sequence[SamplingInput]
    ) -> Callable[[], Sequence[SampledToken | None]]:
        if not all(is_plain(item) for item in inputs):
            logits = self._workspace.logits
            chosen = logits.index_select(0, upload(rows, torch.int64, logits.device))
            return start_sampling(chosen.float(), inputs)

        def read() -> Sequence[SampledToken | None]:
            tokens = self._workspace.tokens[rows].tolist()
            return [None if token == NO_TOKEN else SampledToken(token) for token in tokens]

        return read


def _num_raised(flags: Sequence[Tensor]) -> int:
    """Return how many flags have been raised, by the GPU and by the CPU."""
    return sum(int(each.sum()) for each in flags)


def _rows(memory: SubBatchMemory, sequences: Sequence[ScheduledSequence]) -> Iterator[int]:
    """Yield the row of each sequence: those of a place are in order, and the host's begin after padding."""
    rows = {
        Place.DEVICE: iter(range(memory.rows.device)),
        Place.HOST: iter(range(memory.rows.device, memory.rows.count)),
    }
    return (next(rows[sequence.place]) for sequence in sequences)


def _caches(model: Decoder, storage: KVStorage) -> tuple[Tensor, Tensor]:
    """Return K and V of all layers in the device's memory, as `DeviceLayer` has them."""
    pool = storage.get(Place.DEVICE)
    if pool is not None:
        k_caches, v_caches = pool.parts
        return k_caches, v_caches
    # A policy without a GPU-cache: kernels must be given memory all the same, but nothing is stored there.
    config = model.config
    shape = (config.num_layers, 1, storage.block_size, config.num_kv_heads, config.head_dim)
    nothing = torch.zeros(shape, dtype=model.dtype, device=model.device)
    return nothing, nothing


def _relay(model: Decoder, pool: KVPool) -> Relay:
    layers = []
    for index, window in enumerate(model.config.layer_windows):
        layer = pool.layer(index)
        assert isinstance(layer, HostLayer)
        layers.append(layer.for_relay(window))
    return Relay(layers, block_size=pool.block_size, scale=model.config.attention_scale)
