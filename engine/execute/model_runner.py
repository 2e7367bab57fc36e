"""Execution of plans: each becomes a program, which is started and waited for."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from neo_desktop.engine.batch import (
    DeviceMemoryError,
    IterationPlan,
    IterationResult,
    IterationTiming,
    SubBatch,
)
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
from neo_desktop.engine.execute.build_program import ProgramBuilder
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.host import Relays
from neo_desktop.engine.execute.layout import MIN_BLOCKS, Capacity, GraphKey, Rows
from neo_desktop.engine.execute.program import Program
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.execute.workspace import Workspace
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.dispatch import fits_graph
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Timeout
from neo_desktop.models.stages import Stages
from neo_desktop.native.relay import RelayStalledError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_ITERATIONS = 500  # iterations without graphs after a capture ran out of memory


class OffloadStalledError(RuntimeError):
    """The GPU stalled in a wait for the CPU, and continued only after all flags were raised."""


@dataclass(eq=False)
class _Started:
    """A started iteration."""

    plan: IterationPlan
    wait: Wait


class ModelRunner(Executor):
    """The executor of plans on a model's device and the CPU.

    One thread calls `start` and the returned waits; any thread may call `close`.

    Args:
        capacity: Size of the permanent buffers; larger iterations allocate their own.
        num_programs: Number of decode-attention programs that the GPU runs at once.
        uses_gpu: True if the backend has relays and graphs; the fallback level may still exclude them.
        timeout: Timeout for progress within an iteration; after it, the model runner is lost.
        moves_experts: True if experts in host memory may move to the device.
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
        timeout: Timeout = DEFAULT_TIMEOUT,
        moves_experts: bool = False,
    ) -> None:
        self._model = model = stages.decoder
        self._stages = stages
        self._storage = storage
        self._capacity = capacity
        self._backend = backend
        self._uses_gpu = uses_gpu
        self._timeline = timeline
        self._timeout = timeout
        self._watch = timeout.watch()  # watchdog of the current iteration
        # Without a GPU, iterations of decodes are recorded if no other lane takes part; see `graphs`.
        takes_lanes = model.has_splits or any(tier.is_remote or tier.is_streamed for tier in storage.tiers)
        self._records = not (uses_gpu or stages.is_part or takes_lanes)
        self._has_graphs = uses_gpu and fallbacks.level("graphs") != "eager"
        # All ranks reduce the same rows, so every rank rounds them up, with or without graphs of its own.
        self._always_rounds = uses_gpu and stages.is_part
        with self._backend.on_device():
            has_graphs = self._has_graphs or self._always_rounds
            self._workspace = Workspace(
                stages,
                storage.tiers,
                capacity,
                num_programs,
                has_graphs=has_graphs or self._records,
                is_staged=has_graphs or model.device.type != "cpu",
            )
            sizes = self._workspace, capacity.decodes
            self._builder = ProgramBuilder(stages, storage, *sizes, moves_experts=moves_experts)
        self._has_graphs = self._has_graphs and self.fits_graphs
        has_host = model.has_splits or any(tier.host_attends for tier in storage.tiers)
        self._relays = Relays() if has_host and self._may_use_flags else None
        self._pause = 0  # remaining iterations without graphs
        self._changes = fallbacks.changes  # at the capture of the graphs, which contain the chosen kernels
        self._is_closed = False
        self._lost: EngineLostError | None = None
        self._rows_of_tokens: Mapping[str, int] = {}  # request ID -> row in `Workspace.latest`
        self._started: list[_Started] = []  # started iterations without a wait
        # Iterations that ran ahead of a repeated one; they must be repeated before anything else starts.
        self._void: list[_Started] = []
        self._prepared: tuple[IterationPlan, Program] | None = None
        self._last: IterationResult | None = None
        self._last_end_ns = 0

    @property
    def fits_graphs(self) -> bool:
        """True if graphs can use the memory: on a GPU, host buffers must be pinned."""
        return self._workspace.fits_graphs and self._builder.fits_graphs

    @property
    def runs_ahead(self) -> bool:
        """True if the next iteration can start early.

        If the timeline records an iteration, its spans must be read before the next iteration starts.
        """
        is_recorded = self._timeline is not None and self._timeline.is_recording_next
        is_possible = self._tries_graphs and self._builder.products is None
        return is_possible and bool(self._rows_of_tokens) and not self._void and not is_recorded

    def warm_up(self) -> None:
        """Compile the decode kernels with iterations of padding; compilation takes seconds."""
        if not self._tries_graphs or self._stages.is_part:  # ranks would have to warm up in step
            return
        # One long request splits contexts most, many short ones least. Kernels have at most two variants,
        # with and without a merge of splits, and these two iterations cover both.
        tiers = self._storage.tiers
        for count, blocks in ((1, self._capacity.blocks), (self._capacity.decodes, MIN_BLOCKS)):
            decodes = tuple(0 if tier.host_attends else count for tier in tiers)
            graph_key = GraphKey((Rows(decodes),), max(blocks, MIN_BLOCKS))
            if not any(decodes) or not self._fits(graph_key):
                continue
            try:
                with self._backend.on_device(), torch.inference_mode():
                    program = self._builder.padding(graph_key)
                    self._backend.start(program, with_flags=False, with_graphs=False)
                    self._backend.wait()
            except RuntimeError as error:
                self._step_down(error)
                return

    @property
    def _may_use_flags(self) -> bool:
        return self._uses_gpu and fallbacks.level("graphs") == "host-flags" and self.fits_graphs

    def start(self, plan: IterationPlan) -> Wait:
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        if self._changes != fallbacks.changes:
            self._changes = fallbacks.changes
            self.forget_graphs()
        if plan.is_ahead and not self._started and self._prepared_for(plan) is None:
            plan = self._with_tokens(plan)  # the iteration in flight has ended meanwhile
        if not self._uses_gpu:  # this thread is the device
            return partial(self._attempt, partial(self._carry_out, plan))
        try:
            started = _Started(plan, self._attempt(partial(self._submit, plan)))
        except RuntimeError as error:
            self._step_down(error, plan)
            return self.start(plan)
        self._started.append(started)
        return partial(self._end, started)

    def prepare(self, plan: IterationPlan) -> None:
        """Build the program of a plan, with the tokens of the iteration in flight."""
        with self._backend.on_device(), torch.inference_mode():
            self._prepared = plan, self._build(plan, self._rows_of_tokens)

    def _prepared_for(self, plan: IterationPlan) -> Program | None:
        """Return the plan's program if it was prepared."""
        return self._prepared[1] if self._prepared is not None and self._prepared[0] is plan else None

    def _build(self, plan: IterationPlan, rows_of_tokens: Mapping[str, int]) -> Program:
        for_graphs = self._tries_graphs or self._always_rounds or self._records
        return self._builder.build(plan, rows_of_tokens, for_graphs=for_graphs)

    def _end(self, started: "_Started") -> IterationResult:
        """Wait for an iteration; if it fails, repeat it at a lower fallback level."""
        if started in self._void:
            self._void.remove(started)
        else:
            self._started.remove(started)
            try:
                return self._attempt(started.wait)
            except RuntimeError as error:
                self._step_down(error, started.plan)
            for _ in self._started:  # iterations that ran ahead used the failed iteration's tokens
                self._attempt(self._backend.wait)
            self._void, self._started = self._started, []
        return self.execute(self._with_tokens(started.plan))

    def _with_tokens(self, plan: IterationPlan) -> IterationPlan:
        """Fill in a plan's unknown tokens from the last iteration's result."""
        if not plan.is_ahead:
            return plan
        assert self._last is not None
        sampled = self._last.sampled
        return replace(
            plan,
            is_ahead=False,
            sub_batches=tuple(
                SubBatch(tuple(each.with_token(sampled.get(each.request_id)) for each in batch.sequences))
                for batch in plan.sub_batches
            ),
        )

    def _carry_out(self, plan: IterationPlan) -> IterationResult:
        return self._submit(plan)()

    def _step_down(self, error: RuntimeError, plan: IterationPlan | None = None) -> None:
        """Fall back one level for the failed mechanism; re-raise the error if no fallback exists.

        An iteration can be repeated, since it writes the same KV to the same slots. Plans with block moves
        cannot: their source blocks may have been overwritten. Call this only in an `except` block.
        """
        if self._stages.is_part:  # a single rank cannot repeat an iteration
            raise error
        if isinstance(error, (StreamMemoryError, RelayStalledError, OffloadStalledError)):
            fallbacks.limit("graphs", "device-only", str(error))
            relays, self._relays = self._relays, None
            if relays is not None and not relays.close():
                # A stuck step may still write KV later, into blocks that have a new owner by then.
                self._lost = StageStalledError(str(error))
                raise self._lost from error
        elif is_out_of_memory(error) and self._backend.has_graphs:
            logger.warning(
                "the GPU has no memory for another graph: the next %d iterations run without graphs, which "
                "is slower (%s)",
                PAUSE_ITERATIONS,
                error,
            )
            self._pause = PAUSE_ITERATIONS
            self.forget_graphs()
        elif isinstance(error, torch.AcceleratorError) and not is_lost(error) and self._tries_graphs:
            fallbacks.limit("graphs", "eager", f"a CUDA graph failed: {str(error).partition(chr(10))[0]}")
            self.forget_graphs()
        else:
            raise error
        if plan is not None and plan.copies:
            raise error

    def _attempt(self, work: Callable[[], T]) -> T:
        """Run a part of an iteration; after a failure, no part of the iteration is in flight any more."""
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
            if isinstance(error, DeviceStalledError):  # `_settle` has seen the end of the work
                raise OffloadStalledError(str(error)) from error
            if stalled is not None and isinstance(error, Exception):
                raise stalled from error
            if not is_out_of_memory(error):
                raise
            reason, has_graphs = str(error), self._backend.has_graphs
        # The error held the attempt's frames and their tensors; some survive in reference cycles.
        return_memory()
        if has_graphs:
            raise torch.OutOfMemoryError(reason)
        raise DeviceMemoryError(reason)

    def _settle(self, error: BaseException) -> EngineLostError | None:
        """Wait until all work has ended after an error; return the reason if the work never ends."""
        try:
            # The flags are raised by now, which releases a GPU that only waits for them.
            with self._backend.on_device():
                return self._backend.abandon(device_lost(error) if is_device_lost(error) else error)
        except RuntimeError as another:  # raised if the GPU rejects stream operations
            if not is_device_lost(another):
                raise
            return device_lost(another)

    def _fits(self, graph_key: GraphKey) -> bool:
        """Return True if decode attention, at its fallback level, has few enough launches for a graph."""
        config, max_tokens = self._model.config, graph_key.max_blocks * self._storage.block_size
        return all(
            fits_graph(count, config.num_kv_heads, config.head_dim, max_tokens)
            for rows in graph_key.sub_batches
            for count, tier in zip(rows.decodes, self._storage.tiers, strict=True)
            if not tier.host_attends
        )

    @property
    def _tries_graphs(self) -> bool:
        return self._has_graphs and self._pause == 0 and fallbacks.level("graphs") != "eager"

    def forget_graphs(self) -> None:
        """Drop all graphs: their work has changed, or their memory is needed."""
        self._prepared = None
        self._backend.forget()
        self._builder.forget()

    def give_up(self) -> None:
        """End all waits for the current iteration; any thread may call this when the iteration cannot end."""
        self._watch.give_up()

    def close(self) -> None:
        """End all threads, even during an iteration, and write the timeline if it has a file.

        Threads that do not end within the timeout are left running.
        """
        self._is_closed = True
        if self._relays is not None:
            self._relays.cancel()
        if self._lost is None or not self._uses_gpu:
            self._backend.close()
        if self._timeline is not None:
            self._timeline.close()

    def _submit(self, plan: IterationPlan) -> Wait:
        """Start an iteration's program; return a function that waits for its result."""
        if self._timeline is not None:
            self._timeline.begin_iteration(self._model.device)
        started_ns = time.perf_counter_ns()
        self._watch = watch = self._timeout.watch(plan.predicted.total_ms)
        self._backend.begin(watch)
        tries_graphs = self._tries_graphs
        program = self._prepared_for(plan) or self._build(plan, self._rows_of_tokens if plan.is_ahead else {})
        self._prepared = None  # further programs may use its memory
        self._pause = max(self._pause - 1, 0)
        tasks = program.tasks
        with_graphs = tries_graphs and self._fits(program.graph_key)
        with_graphs = with_graphs or (self._records and program.is_whole)
        with_flags = self._relays is not None and self._may_use_flags
        if tasks and not with_flags:
            with_graphs = False  # the CPU's part runs on threads, which need Python between layers
        relays = self._relays if with_flags and tasks else None
        if relays is not None:
            relays.start(tasks, watch)
        is_first = self._backend.start(program, with_flags=with_flags, with_graphs=with_graphs)
        outputs = program.outputs  # the next iteration may fill the program again
        self._rows_of_tokens = outputs.rows_of_tokens

        def wait() -> IterationResult:
            self._backend.wait()
            if relays is not None:
                relays.finish(self._timeline)
            attention_ns = sum(task.busy_ns for task in tasks if task.is_awaited)
            if self._is_closed:
                raise RuntimeError("the executor was closed in the middle of an iteration")
            now_ns = time.perf_counter_ns()
            total_ns, self._last_end_ns = now_ns - max(started_ns, self._last_end_ns), now_ns
            copies = program.copied()
            timing = IterationTiming(total_ns / 1e6, attention_ns / 1e6, is_first, *copies)
            self._last = outputs.result(timing)
            program.end()
            if self._timeline is not None:
                self._timeline.end_iteration()
            return self._last

        return wait
