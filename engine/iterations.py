"""Iterations, one after the other: planned, started, waited for, taken in."""

import logging
import time
from collections import deque

from neo_desktop.engine.batch import DeviceMemoryError, IterationPlan, IterationTiming
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.host_reserve import HostReserve
from neo_desktop.engine.live import Notes
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.remote.link import WorkerLostError
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0  # for a lost worker to come back, where nobody else can do its work


class Iterations:
    """Carries out what a scheduler plans; one thread's.

    Args:
        scheduler: plans, and takes results in.
        executor: computes; closed and dropped by `close`.
        cost_model: learns from each iteration.
        notes: for those who look at what goes on.
        workers: attention workers; None: there are none.
        reserve: looks after the host's memory; None: nobody does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cost_model: CorrectedCostModel | None,
        notes: Notes,
        workers: Workers | None = None,
        reserve: HostReserve | None = None,
    ) -> None:
        self.executor = executor
        self.num_started = 0
        self.outside_s = 0.0  # what passed between iterations that followed each other
        self._scheduler = scheduler
        self._cost_model = cost_model
        self._notes = notes
        self._workers = workers
        self._reserve = reserve
        self._under_way: deque[tuple[IterationPlan, Wait]] = deque()  # one, or two for a moment
        self._gained: list[Request] = []  # by the iterations whose outputs nobody has taken yet
        self._failed: list[RequestOutput] = []  # the ends of requests that iterations failed for
        self._last_end_s: float | None = None  # when the iteration before ended, if no pause followed

    @property
    def has_more(self) -> bool:
        """Whether an iteration has not ended, or outputs have not been taken."""
        return bool(self._under_way or self._gained or self._failed)

    def collect(self) -> None:
        """Wait for the iteration under way, or else for one that starts now, and take its tokens in.

        Meanwhile the next iteration is decided on, as if no token of this one ended a request; it starts if
        it can do so before the tokens are known.
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
        if result.timing is not None:
            self._book_time(result.timing)
            if self._notes.is_on:
                self._notes.note(plan, result.timing)
            if self._cost_model is not None:
                self._cost_model.learn(plan.predicted, result.timing)
        self._gained += self._scheduler.update(result)

    def launch(self) -> None:
        """Plan the next iteration, of all requests that are there now, and start it, if there is work.

        Nothing is done while one is under way, as when it started before the last one had ended.
        """
        if self._under_way:
            return
        self.rest()
        if self._workers is not None:
            for tier, num_blocks in self._workers.take_returned().items():
                self._scheduler.open(tier, num_blocks)
        plan = self._scheduler.schedule()
        while plan is None and self._scheduler.num_waiting and self._reserve and self._reserve.make_room():
            plan = self._scheduler.schedule()
        if plan is None:
            self._last_end_s = None
            if self._scheduler.num_waiting and self._workers is not None:
                self._await_workers(self._workers)
            elif self._scheduler.num_waiting and self._reserve is not None and self._reserve.is_short:
                why = "no cache has room for so long a context, and the system gives no more memory for it"
                self._failed += self._scheduler.refuse_first(why)
            return
        try:
            self._start(plan)
        except Exception as error:  # whatever broke, the other requests must go on
            self._give_up(error)

    def rest(self) -> bool:
        """Look after the host's memory; return whether a cache has another size by that."""
        return self._reserve is not None and not self._under_way and self._reserve.look()

    def _await_workers(self, workers: Workers) -> None:
        """Wait a moment for a lost worker: nobody else has memory for the request that comes first."""
        if workers.wait_for_return(LONGEST_WAIT_S):
            return
        why = "no memory that is left holds so long a context"
        lost = [
            f"{tier} is lost: {state.lost}"
            for tier, state in workers.states.items()
            if state.lost is not None
        ]
        self._failed += self._scheduler.refuse_first(": ".join((why, *lost[:1])))

    def _launch_ahead(self) -> None:
        """Decide on the iteration after the one under way, and start it if it need not wait for that."""
        # The sizes of caches change between two iterations, when nothing is under way.
        may_start = self.executor.runs_ahead and not (self._reserve is not None and self._reserve.is_due)
        plan = self._scheduler.look_ahead(may_start=may_start)
        if plan is None:
            return
        try:
            self._start(plan)
        except Exception as error:
            if is_lost(error):
                raise
            self._scheduler.take_back()  # what is wrong shows when it starts in its turn

    def _start(self, plan: IterationPlan) -> None:
        self.num_started += 1
        self._under_way.append((plan, self.executor.start(plan)))

    def take_outputs(self) -> list[RequestOutput]:
        """Return what requests gained since the last call; best while an iteration is under way.

        Text is made only now. An aborted request has given its last output already.
        """
        gained, self._gained = self._gained, []
        failed, self._failed = self._failed, []
        return [
            request.take_output() for request in gained if request.finish_reason is not FinishReason.ABORT
        ] + failed

    def _give_up(self, error: Exception) -> None:
        """Take in that the iteration under way failed, and end the requests that cannot go on.

        Raises:
            the error: nothing can be computed in this process any more.
        """
        self._last_end_s = None
        if is_lost(error):
            raise error
        while self._under_way:  # it started ahead of its tokens
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
        elif not is_known:  # it stays so for a while, and larger iterations are tried now and then
            logger.warning("the device is short of memory: going on with smaller iterations (%s)", error)

    def _book_time(self, timing: IterationTiming) -> None:
        """Add up what passes between iterations that follow each other."""
        now = time.perf_counter()
        if self._last_end_s is not None:
            self.outside_s += now - self._last_end_s - timing.total_ms / 1e3
        self._last_end_s = now

    def close(self) -> None:
        """Close the executor and drop it; may be called again."""
        if (executor := vars(self).pop("executor", None)) is not None:
            executor.close()
