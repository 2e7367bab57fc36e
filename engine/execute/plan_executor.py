"""Carries out plans: makes a program of each, starts it, and waits for its tokens."""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from neo_desktop.engine.batch import (
    DeviceMemoryError,
    FloatArray,
    IterationPlan,
    IterationResult,
    IterationTiming,
    SampledToken,
    SamplingInput,
)
from neo_desktop.engine.cuda.copies import download, upload
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
from neo_desktop.engine.execute.backend import Backend
from neo_desktop.engine.execute.build_program import Asked, ProgramBuilder
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.host import Relays
from neo_desktop.engine.execute.layout import MIN_BLOCKS, Bucket, Capacity, Rows
from neo_desktop.engine.execute.program import Program
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage, Timeline
from neo_desktop.engine.execute.workspace import Workspace
from neo_desktop.engine.kernels.dispatch import fits_graph
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.sampler import NO_TOKEN, is_plain, start_sampling
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Patience
from neo_desktop.models.stages import Stages
from neo_desktop.native.relay import RelayStalledError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_ITERATIONS = 500  # without graphs, once there was no room for one: another program may need the memory


class HandOverStalledError(RuntimeError):
    """The GPU went on only when all flags were raised that it may wait for."""


class PlanExecutor(Executor):
    """Runs plans on a model's device and the CPU beside it.

    `start` and what it returns are called by one thread, `close` by any.

    Args:
        stages: the model's.
        storage: holds the KV.
        capacity: of the memory that is kept for iterations; larger ones take more, each for itself.
        backend: runs the programs.
        num_programs: of decode attention, that the GPU runs at once.
        uses_gpu: whether the backend has relays and graphs, as far as the ladder allows them.
        timeline: records what every lane does.
        patience: with stages of an iteration; when it ends, the executor is lost.
    """

    def __init__(
        self,
        stages: Stages,
        storage: KVStorage,
        capacity: Capacity,
        backend: Backend,
        *,
        num_programs: int = 1,
        uses_gpu: bool = False,
        timeline: Timeline | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._model = model = stages.decoder
        self._stages = stages
        self._storage = storage
        self._capacity = capacity
        self._backend = backend
        self._uses_gpu = uses_gpu
        self._timeline = timeline
        self._patience = patience
        self._watch = patience.watch()  # of the iteration
        self._has_graphs = uses_gpu and stages.writes_in_place and ladder.rung("graphs") != "eager"
        with self._backend.on_device():
            self._workspace = Workspace(
                model.config,
                model.dtype,
                model.device,
                storage.places,
                capacity,
                num_programs,
                has_graphs=self._has_graphs,
            )
        self._has_graphs = self._has_graphs and self._workspace.fits_graphs
        self._builder = ProgramBuilder(stages, storage, self._workspace)
        has_host = any(place.in_host_memory for place in storage.places)
        self._relays = Relays(model.config, storage) if has_host and self._may_use_flags else None
        self._pause = 0  # iterations for which graphs are not tried
        self._ladder_changes = ladder.changes  # when graphs were captured
        self._is_closed = False
        self._lost: EngineLostError | None = None

    @property
    def fits_graphs(self) -> bool:
        """Whether the memory is such that a GPU's graphs can use it: pinned, where it is the host's."""
        return self._workspace.fits_graphs

    def warm_up(self) -> None:
        """Compile the kernels of decodes, which takes seconds, by iterations in which nobody decodes."""
        if not self._tries_graphs:
            return
        # Contexts are cut most where one request is long, and least where many are short. No kernel has more
        # variants than these two: without merging and with it.
        places = self._storage.places
        for count, blocks in ((1, self._capacity.blocks), (self._capacity.decodes, MIN_BLOCKS)):
            decodes = tuple(0 if place.host_attends else count for place in places)
            bucket = Bucket((Rows(decodes),), max(blocks, MIN_BLOCKS))
            if not any(decodes) or not self._fits(bucket):
                continue
            try:
                with self._backend.on_device(), torch.inference_mode():
                    program = self._builder.padding(bucket)
                    self._backend.start(program, with_flags=False, with_graphs=False)
                    self._backend.wait()
            except RuntimeError as error:
                self._step_down(error)
                return

    @property
    def _may_use_flags(self) -> bool:
        return self._uses_gpu and ladder.rung("graphs") == "host-flags" and self._workspace.fits_graphs

    def start(self, plan: IterationPlan) -> Wait:
        """See `Executor`."""
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        if self._ladder_changes != ladder.changes:  # graphs hold kernels as they were chosen
            self._ladder_changes = ladder.changes
            self._backend.forget()
        if not self._uses_gpu:  # no device works beside this thread
            return partial(self._attempt, partial(self._carry_out, plan))
        try:
            return partial(self._end, plan, self._attempt(partial(self._submit, plan)))
        except RuntimeError as error:
            self._step_down(error, plan)
        return self.start(plan)

    def _end(self, plan: IterationPlan, wait: Wait) -> IterationResult:
        """Wait for an iteration; if it cannot be ended, do it again in another way."""
        try:
            return self._attempt(wait)
        except RuntimeError as error:
            self._step_down(error, plan)
        return self.execute(plan)

    def _carry_out(self, plan: IterationPlan) -> IterationResult:
        return self._submit(plan)()

    def _step_down(self, error: RuntimeError, plan: IterationPlan | None = None) -> None:
        """See to it that the next iteration does without what has failed; raise what nothing else serves for.

        What was done can be done again, since the same KV is written to the same place; but not when blocks
        moved, whose old places may have been written to since. Called where errors are caught: what is raised
        is the error itself.
        """
        if isinstance(error, (StreamMemoryError, RelayStalledError, HandOverStalledError)):
            ladder.limit("graphs", "device-only", str(error))
            relays, self._relays = self._relays, None
            if relays is not None and not relays.close():
                # Whenever its step goes on, it stores KV in blocks that may be somebody else's by then.
                self._lost = StageStalledError(str(error))
                raise self._lost from error
        elif is_out_of_memory(error) and self._backend.has_graphs:
            self._pause_graphs(error)
        elif isinstance(error, torch.AcceleratorError) and not is_lost(error) and self._tries_graphs:
            ladder.limit("graphs", "eager", f"a CUDA graph failed: {str(error).partition(chr(10))[0]}")
            self._backend.forget()
        else:
            raise error
        if plan is not None and plan.copies:
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
        self._backend.forget()

    def _attempt(self, work: Callable[[], T]) -> T:
        """Do a part of an iteration; when it fails, nothing of the iteration is under way any more."""
        try:
            with self._backend.on_device(), torch.inference_mode():
                if self._is_closed:
                    raise RuntimeError("the executor is closed")
                return work()
        except BaseException as error:
            stalled = None if self._relays is None else self._relays.break_off()
            lost = self._settle(error)
            if self._timeline is not None:
                self._timeline.end_iteration(completed=False)
            if lost is not None:
                self._lost = self._lost or lost
                self._watch.give_up()
                if lost is not error:
                    raise lost from error
                raise
            if self._is_closed and isinstance(error, Exception):
                raise RuntimeError("the executor was closed in the middle of an iteration") from error
            if isinstance(error, DeviceStalledError):  # but it has ended by now
                raise HandOverStalledError(str(error)) from error
            if stalled is not None and isinstance(error, Exception):
                raise stalled from error
            if not is_out_of_memory(error):
                raise
            reason, has_graphs = str(error), self._backend.has_graphs
        # The error held the attempt's frames, and they its tensors; some still do in a circle.
        gc.collect()
        torch.cuda.empty_cache()
        if has_graphs:
            raise torch.OutOfMemoryError(reason)
        raise DeviceMemoryError(reason)

    def _settle(self, error: BaseException) -> EngineLostError | None:
        """Wait until nothing is under way after an error; return why that never will be so, if so."""
        try:
            # A GPU that only waits for flags goes on now.
            with self._backend.on_device():
                if isinstance(error, DeviceStalledError):
                    return self._backend.abandon(RuntimeError(str(error)))
                return self._backend.abandon(device_lost(error) if is_device_lost(error) else error)
        except RuntimeError as another:  # of a GPU that does not take streams any more
            if not is_device_lost(another):
                raise
            return device_lost(another)

    def _fits(self, bucket: Bucket) -> bool:
        """Whether decode attention, as the ladder has it, is few enough launches for a graph."""
        config, max_tokens = self._model.config, bucket.max_blocks * self._storage.block_size
        return all(
            fits_graph(count, config.num_kv_heads, config.head_dim, max_tokens)
            for rows in bucket.sub_batches
            for count, place in zip(rows.decodes, self._storage.places, strict=True)
            if not place.host_attends
        )

    @property
    def _tries_graphs(self) -> bool:
        return self._has_graphs and self._pause == 0 and ladder.rung("graphs") != "eager"

    def close(self) -> None:
        """End all threads, also in the middle of an iteration, and write the timeline if it has a file.

        What does not end within the patience is left behind.
        """
        self._is_closed = True
        if self._relays is not None:
            self._relays.cancel()
        if self._lost is None or not self._uses_gpu:
            self._backend.close()
        if self._timeline is not None:
            self._timeline.close()

    def _submit(self, plan: IterationPlan) -> Wait:
        """Start an iteration's program and the sampling behind it; return what waits for them."""
        if self._timeline is not None:
            self._timeline.begin_iteration(self._model.device)
        started_ns = time.perf_counter_ns()
        self._watch = watch = self._patience.watch(plan.predicted.total_ms)
        self._backend.begin(watch)
        with_graphs = self._tries_graphs
        self._pause = max(self._pause - 1, 0)
        program, asked = self._builder.build(plan, for_graphs=with_graphs)
        batches, transfers = program.batches, program.transfers
        with_flags = self._relays is not None and self._may_use_flags
        if (batches or transfers) and not with_flags:
            with_graphs = False  # threads do the CPU's part, and Python is needed between layers
        if self._relays is not None and with_flags:
            self._relays.start(batches, transfers, watch)
        is_first = self._backend.start(
            program,
            with_flags=with_flags,
            with_graphs=with_graphs and program.is_fixed and self._fits(program.bucket),
        )
        tokens, pooled = self._start_sampling(program, asked)

        def wait() -> IterationResult:
            self._backend.wait()
            attention_ns = sum(batch.attention_ns for batch in batches)
            if self._relays is not None and with_flags:
                attention_ns += self._relays.finish(self._timeline)
            if self._is_closed:
                raise RuntimeError("the executor was closed in the middle of an iteration")
            chosen = tokens()
            total_ns = time.perf_counter_ns() - started_ns
            timing = IterationTiming(total_ns / 1e6, attention_ns / 1e6, is_first)
            sums = pooled()
            if self._timeline is not None:
                self._timeline.end_iteration()
            names = [each.sequence.request_id for each in asked if each.sampling is not None]
            return _result_of(names, chosen, self._model.dtype, timing, sums)

        return wait

    def _start_sampling(
        self, program: Program, asked: Sequence[Asked]
    ) -> tuple[Callable[[], Sequence[SampledToken | None]], Callable[[], Mapping[str, FloatArray]]]:
        """Start to choose tokens, and to sum hidden states that are asked for; return what waits for both."""
        sampled = [(each.first_row, each.sampling) for each in asked if each.sampling is not None]
        rows, inputs = [row for row, _ in sampled], [sampling for _, sampling in sampled]
        if program.chooses:
            return self._read_tokens(rows, inputs), dict
        states = program.last_states
        if states is None:
            return tuple, dict
        device, pooled = states.device, [each for each in asked if each.sequence.num_pooled]
        if pooled:
            totals = [
                states[each.first_row : each.first_row + each.num_rows].float().sum(dim=0) for each in pooled
            ]
            arrived = download(torch.stack(totals))
            names = [each.sequence.request_id for each in pooled]

            def sums() -> Mapping[str, FloatArray]:
                return dict(zip(names, arrived().numpy(), strict=True))

            states = states[upload(rows, torch.int64, device)]
        else:
            sums = dict
        if not rows:
            return tuple, sums
        started_ns = time.perf_counter_ns()
        out = torch.empty(len(rows), self._model.config.vocab_size, dtype=states.dtype, device=device)
        tokens = start_sampling(self._stages.logits(states, out).float(), inputs)
        if self._timeline is not None and self._timeline.is_recording and device.type == "cpu":
            stage = Stage("sample", self._model.config.num_layers, NO_SUB_BATCH, len(rows))
            self._timeline.add("device", stage, started_ns, time.perf_counter_ns())
        return tokens, sums

    def _read_tokens(
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


def _result_of(
    request_ids: Sequence[str],
    tokens: Sequence[SampledToken | None],
    dtype: torch.dtype,
    timing: IterationTiming,
    pooled: Mapping[str, FloatArray],
) -> IterationResult:
    """Return the result of an iteration whose sampler gave each of these requests a token, or none."""
    by_request = dict(zip(request_ids, tokens, strict=True))
    damaged = [request_id for request_id, token in by_request.items() if token is None]
    damaged += [request_id for request_id, total in pooled.items() if not np.isfinite(total).all()]
    return IterationResult(
        sampled={request_id: token for request_id, token in by_request.items() if token is not None},
        failed=dict.fromkeys(
            damaged,
            "the model's output is not finite: its weights may be damaged, or the numbers "
            f"exceed {dtype}; try another dtype",
        ),
        pooled=pooled,
        timing=timing,
    )
