"""Iterations: plan, start, wait, update."""

import logging
import time
from collections import deque

from neo_desktop.engine.batch import DeviceMemoryError, IterationPlan
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.host_reserve import HostReserve
from neo_desktop.engine.kv.disk_cache import DiskCache
from neo_desktop.engine.live import Notes
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.remote.link import WorkerLostError
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0  # for a lost worker to return, if no other tier has room


class Iterations:
    """Runs the scheduler's plans; single-threaded. `Engine` adds requests and views.

    Args:
        executor: closed and dropped by `close`.
        reserve: manages host memory; None: caches keep their size.
        disk: keeps blocks that leave the caches; None: they are lost.
    """

    def __init__(
        self,
        scheduler: Scheduler[Request],
        executor: Executor,
        cost_model: CorrectedCostModel | None,
        notes: Notes,
        workers: Workers | None = None,
        reserve: HostReserve | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        self.executor = executor
        self.num_started = 0
        self.outside_s = 0.0  # time between consecutive iterations
        self._scheduler = scheduler
        self._cost_model = cost_model
        self._notes = notes
        self._workers = workers
        self._reserve = reserve
        self._disk = disk
        self._under_way: deque[tuple[IterationPlan, Wait]] = deque()  # one, or briefly two
        self._gained: list[Request] = []  # requests with outputs that have not been taken yet
        self._failed: list[RequestOutput] = []  # last outputs of failed requests
        # end of the previous iteration, unless the engine was idle since
        self._last_end_s: float | None = None

    @property
    def has_more(self) -> bool:
        return bool(self._under_way or self._gained or self._failed)

    def collect(self) -> None:
        """Wait for the current iteration, or start one and wait, and apply its tokens.

        Meanwhile, decide on the next iteration as if no request finished in this one, and start or prepare it
        if it does not need this one's tokens.
        """
        self.launch()
        if not self._under_way:
            return
        self._launch_ahead()
        plan, wait = self._under_way.popleft()
        try:
            result = wait()
        except Exception as error:
            self._give_up(error)
            return
        num_accepted = -self._scheduler.counters.num_accepted
        self._gained += self._scheduler.update(result)
        num_accepted += self._scheduler.counters.num_accepted
        if result.timing is not None:
            now = time.perf_counter()
            if self._last_end_s is not None:
                self.outside_s += now - self._last_end_s - result.timing.total_ms / 1e3
            self._last_end_s = now
            if self._notes.is_on:
                self._notes.note(plan, result.timing, num_accepted)
            if self._cost_model is not None:
                self._cost_model.learn(plan.predicted, result.timing)
        if self._disk is not None:
            self._disk.look(len(self._under_way))

    def launch(self) -> None:
        """Plan the next iteration with all requests present, and start it.

        Do nothing while an iteration runs, for example one that started ahead.
        """
        if self._under_way:
            return
        self.rest()
        if self._workers is not None:
            for tier, num_blocks in self._workers.take_returned().items():
                self._scheduler.open(tier, num_blocks)
        plan = self._scheduler.schedule()
        if plan is None and self._scheduler.queues.waiting and self._disk and self._disk.wait():
            self._last_end_s = None
            return
        while plan is None and self._scheduler.queues.waiting and self._reserve and self._reserve.make_room():
            plan = self._scheduler.schedule()
        if plan is None:
            self._last_end_s = None
            if self._scheduler.queues.waiting and self._workers is not None:
                self._await_workers(self._workers)
            elif self._scheduler.queues.waiting and self._reserve is not None and self._reserve.is_short:
                why = "no cache has room for a context of this length, and the system has no more memory"
                self._failed += self._scheduler.refuse_first(why)
            return
        try:
            self._start(plan)
        except Exception as error:  # other requests must continue after any error
            self._give_up(error)

    def rest(self) -> bool:
        """Do the periodic work of an idle engine: check the host memory reserve and the disk.

        Returns:
            True if statistics have changed.
        """
        has_changed = self._disk is not None and self._disk.look(len(self._under_way))
        return (self._reserve is not None and not self._under_way and self._reserve.look()) or has_changed

    def _await_workers(self, workers: Workers) -> None:
        """Wait a moment for a lost worker, if no other tier can hold the first request."""
        if workers.wait_for_return(LONGEST_WAIT_S):
            return
        why = "the remaining memory cannot hold a context of this length"
        lost = [
            f"{tier} is lost: {state.lost}"
            for tier, state in workers.states.items()
            if state.lost is not None
        ]
        self._failed += self._scheduler.refuse_first(": ".join((why, *lost[:1])))

    def _launch_ahead(self) -> None:
        """Decide on the iteration after the current one, and start or prepare it if it need not wait.

        The CPU serves one iteration at a time, so only iterations of the device alone start.
        """
        # Cache sizes change only between iterations, while none runs.
        may_plan = self.executor.runs_ahead and not (self._reserve is not None and self._reserve.is_due)
        plan = self._scheduler.look_ahead(may_plan=may_plan)
        if plan is None:
            return
        starts = plan.stays_on_device and self._under_way[0][0].stays_on_device
        if starts:
            plan = self._scheduler.begin()
        try:
            if starts:
                self._start(plan)
            else:
                self.executor.prepare(plan)
        except Exception as error:  # it recurs when the iteration starts in order
            if is_lost(error):
                raise
            logger.debug(
                "an iteration cannot be %s", "started ahead" if starts else "prepared", exc_info=error
            )
            if starts:
                self._scheduler.take_back()

    def _start(self, plan: IterationPlan) -> None:
        self.num_started += 1
        self._under_way.append((plan, self.executor.start(plan)))

    def take_outputs(self) -> list[RequestOutput]:
        """Return new outputs since the last call; call it while an iteration runs.

        Decoding to text happens here. Aborted requests have given their last output already.
        """
        gained, self._gained = self._gained, []
        failed, self._failed = self._failed, []
        return [
            request.take_output() for request in gained if request.finish_reason is not FinishReason.ABORT
        ] + failed

    def _give_up(self, error: Exception) -> None:
        """Handle the failure of the current iteration, and end the requests that cannot continue.

        Raises:
            the error: this process cannot compute any more.
        """
        self._last_end_s = None
        if is_lost(error):
            raise error
        while self._under_way:  # it started ahead
            _, wait = self._under_way.popleft()
            try:
                wait()
            except Exception as another:
                if is_lost(another):
                    raise
            self._scheduler.take_back()
        if isinstance(error, WorkerLostError) and self._workers is not None:
            self._scheduler.lose(self._workers.lose(error))
            return
        if not isinstance(error, DeviceMemoryError):
            logger.error("an iteration failed", exc_info=error)
            self._failed += self._scheduler.fail(f"the engine failed: {error}")
            return
        is_known = self._scheduler.is_short_of_memory
        if not self._scheduler.shrink():
            self._failed += self._scheduler.fail(f"the device has no memory left: {error}")
        elif not is_known:  # the limit stays for a while; larger iterations are retried now and then
            logger.warning("the device is short of memory: continuing with smaller iterations (%s)", error)

    def close(self) -> None:
        """Close and drop the executor and the KV pools; may be called again."""
        if self._disk is not None:
            self._disk.close()
        self._disk = None
        self._reserve = None
        if (executor := vars(self).pop("executor", None)) is not None:
            executor.close()
