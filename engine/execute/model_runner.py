"""Carries out plans: makes a program of each, starts it, and waits for its tokens."""

import gc
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
from neo_desktop.engine.execute.host import HostBatch, Relays
from neo_desktop.engine.execute.layout import MIN_BLOCKS, Capacity, GraphKey, Rows
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.execute.workspace import Workspace
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.dispatch import fits_graph
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Timeout
from neo_desktop.models.stages import Stages
from neo_desktop.native.relay import RelayStalledError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_ITERATIONS = 500  # without graphs, once there was no room for one: another program may need the memory


class OffloadStalledError(RuntimeError):
    """The GPU went on only when all flags were raised that it may wait for."""


@dataclass(eq=False)
class _Started:
    """An iteration that was started."""

    plan: IterationPlan
    wait: Wait


class ModelRunner(Executor):
    """Runs plans on a model's device and the CPU beside it.

    `start` and what it returns are called by one thread, `close` by any.

    Args:
        stages: the model's.
        storage: holds the KV.
        capacity: of the memory that is kept for iterations; larger ones take more, each for itself.
        backend: runs the programs.
        num_programs: of decode attention, that the GPU runs at once.
        uses_gpu: whether the backend has relays and graphs, as far as the fallback level allows them.
        timeline: records what every lane does.
        timeout: with stages of an iteration; when it ends, the executor is lost.
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
    ) -> None:
        self._model = model = stages.decoder
        self._stages = stages
        self._storage = storage
        self._capacity = capacity
        self._backend = backend
        self._uses_gpu = uses_gpu
        self._timeline = timeline
        self._timeout = timeout
        self._watch = timeout.watch()  # of the iteration
        can_have_graphs = uses_gpu and stages.writes_in_place
        self._has_graphs = can_have_graphs and fallbacks.level("graphs") != "eager"
        # All ranks add up the same rows, so that all round them up, whether or not each of them has graphs.
        self._always_rounds = can_have_graphs and stages.is_part
        with self._backend.on_device():
            has_graphs = self._has_graphs or self._always_rounds
            self._workspace = Workspace(stages, storage.tiers, capacity, num_programs, has_graphs=has_graphs)
            self._builder = ProgramBuilder(stages, storage, self._workspace, capacity.decodes)
        self._has_graphs = self._has_graphs and self.fits_graphs
        has_host = model.has_splits or any(tier.host_attends for tier in storage.tiers)
        self._relays = Relays(model.config, storage) if has_host and self._may_use_flags else None
        self._pause = 0  # iterations for which graphs are not tried
        self._changes = fallbacks.changes  # when graphs were captured: they hold kernels as they were chosen
        self._is_closed = False
        self._lost: EngineLostError | None = None
        self._rows_of_tokens: Mapping[str, int] = {}  # in `Workspace.latest`, of the iteration started last
        self._started: list[_Started] = []  # that nobody has waited for
        # Those after one that was done again: they have to be, too, before anything else starts.
        self._void: list[_Started] = []
        self._last: IterationResult | None = None
        self._last_end_ns = 0

    @property
    def fits_graphs(self) -> bool:
        """Whether the memory is such that a GPU's graphs can use it: pinned, where it is the host's."""
        return self._workspace.fits_graphs and self._builder.fits_graphs

    @property
    def runs_ahead(self) -> bool:
        """See `Executor`; spans of an iteration that is recorded are read before the next one starts."""
        is_recorded = self._timeline is not None and self._timeline.is_recording_next
        is_possible = self._tries_graphs and self._workspace.split is None
        return is_possible and bool(self._rows_of_tokens) and not self._void and not is_recorded

    def warm_up(self) -> None:
        """Compile the kernels of decodes, which takes seconds, by iterations in which nobody decodes."""
        if not self._tries_graphs or self._stages.is_part:  # nobody says when all ranks would do it
            return
        # Contexts are cut most where one request is long, and least where many are short. No kernel has more
        # variants than these two: without merging and with it.
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
            self._backend.forget()
        if not self._uses_gpu:  # no device works beside this thread
            return partial(self._attempt, partial(self._carry_out, plan))
        try:
            started = _Started(plan, self._attempt(partial(self._submit, plan)))
        except RuntimeError as error:
            self._step_down(error, plan)
            return self.start(plan)
        self._started.append(started)
        return partial(self._end, started)

    def _end(self, started: "_Started") -> IterationResult:
        """Wait for an iteration; if it cannot be ended, do it again in another way."""
        if started in self._void:
            self._void.remove(started)
        else:
            self._started.remove(started)
            try:
                return self._attempt(started.wait)
            except RuntimeError as error:
                self._step_down(error, started.plan)
            for _ in self._started:  # ahead of it, and with its tokens
                self._attempt(self._backend.wait)
            self._void, self._started = self._started, []
        return self.execute(self._with_tokens(started.plan))

    def _with_tokens(self, plan: IterationPlan) -> IterationPlan:
        """Return a plan whose unknown tokens are those that the iteration before has brought since."""
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
        """See to it that the next iteration does without what has failed; raise what nothing else serves for.

        What was done can be done again, since the same KV is written to the same tier; but not when blocks
        moved, whose old tiers may have been written to since. Called where errors are caught: what is raised
        is the error itself.
        """
        if self._stages.is_part:  # nothing is done again by one rank alone
            raise error
        if isinstance(error, (StreamMemoryError, RelayStalledError, OffloadStalledError)):
            fallbacks.limit("graphs", "device-only", str(error))
            relays, self._relays = self._relays, None
            if relays is not None and not relays.close():
                # Whenever its step goes on, it stores KV in blocks that may be somebody else's by then.
                self._lost = StageStalledError(str(error))
                raise self._lost from error
        elif is_out_of_memory(error) and self._backend.has_graphs:
            self._pause_graphs(error)
        elif isinstance(error, torch.AcceleratorError) and not is_lost(error) and self._tries_graphs:
            fallbacks.limit("graphs", "eager", f"a CUDA graph failed: {str(error).partition(chr(10))[0]}")
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
                raise OffloadStalledError(str(error)) from error
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
                return self._backend.abandon(device_lost(error) if is_device_lost(error) else error)
        except RuntimeError as another:  # of a GPU that does not take streams any more
            if not is_device_lost(another):
                raise
            return device_lost(another)

    def _fits(self, graph_key: GraphKey) -> bool:
        """Whether decode attention, as the fallbacks has it, is few enough launches for a graph."""
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

    def give_up(self) -> None:
        """Let nobody wait for the iteration under way any more; any thread may find that it cannot end."""
        self._watch.give_up()

    def close(self) -> None:
        """End all threads, also in the middle of an iteration, and write the timeline if it has a file.

        What does not end within the timeout is left behind.
        """
        self._is_closed = True
        if self._relays is not None:
            self._relays.cancel()
        if self._lost is None or not self._uses_gpu:
            self._backend.close()
        if self._timeline is not None:
            self._timeline.close()

    def _submit(self, plan: IterationPlan) -> Wait:
        """Start an iteration's program; return what waits for it and its result."""
        if self._timeline is not None:
            self._timeline.begin_iteration(self._model.device)
        started_ns = time.perf_counter_ns()
        self._watch = watch = self._timeout.watch(plan.predicted.total_ms)
        self._backend.begin(watch)
        with_graphs = self._tries_graphs
        self._pause = max(self._pause - 1, 0)
        rows_of_tokens = self._rows_of_tokens if plan.is_ahead else {}
        for_graphs = with_graphs or self._always_rounds
        program = self._builder.build(plan, rows_of_tokens, for_graphs=for_graphs)
        on_host, transfers = program.on_host, program.transfers
        with_flags = self._relays is not None and self._may_use_flags
        if (on_host or transfers) and not with_flags:
            with_graphs = False  # threads do the CPU's part, and Python is needed between layers
        relays = self._relays if with_flags and (on_host or transfers) else None
        if relays is not None:
            relays.start(on_host, transfers, watch)
        is_first = self._backend.start(
            program,
            with_flags=with_flags,
            with_graphs=with_graphs and program.is_fixed and self._fits(program.graph_key),
        )
        self._rows_of_tokens = program.outputs.rows_of_tokens

        def wait() -> IterationResult:
            self._backend.wait()
            if relays is not None:
                relays.finish(self._timeline)
            batches = [each for each in on_host if isinstance(each, HostBatch) and each.is_waited_for]
            attention_ns = sum(each.busy_ns for each in batches)
            if self._is_closed:
                raise RuntimeError("the executor was closed in the middle of an iteration")
            now_ns = time.perf_counter_ns()
            total_ns, self._last_end_ns = now_ns - max(started_ns, self._last_end_ns), now_ns
            copies = program.copies()
            timing = IterationTiming(total_ns / 1e6, attention_ns / 1e6, is_first, *copies)
            self._last = program.outputs.result(timing)
            program.end()
            if self._timeline is not None:
                self._timeline.end_iteration()
            return self._last

        return wait
