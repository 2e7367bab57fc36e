"""CUDA streams and graphs without a GPU: operations run in any order that streams and events allow."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import DeviceStalledError, EngineLostError
from neo_desktop.engine.execute.backend import NEVER_CAPTURED
from neo_desktop.engine.execute.graphs import AnyProgram, sections
from neo_desktop.engine.execute.lane import HostTask, Lane, Signal, Step
from neo_desktop.engine.execute.lanes import TOLD_BY
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.native.relay import DONE, READY

TIMEOUT_S = 60.0  # for a flag that must come; only a defect waits this long
LANES = tuple(lane for lane in Lane if lane not in TOLD_BY)
FIXED = tuple(lane for lane in LANES if lane not in NEVER_CAPTURED)
NOTHING = Stage("nothing", 0, NO_SUB_BATCH, 0)

Hook = Callable[[Lane, Stage], None]


@dataclass(eq=False)
class Operation:
    lane: Lane
    stage: Stage
    work: Callable[[], object]
    after: tuple["Operation", ...]  # its predecessor on the lane, and the operations it waits for
    is_ready: Callable[[], bool] = lambda: True
    flag: int | None = None  # address of the raised flag; for a wait, of the flag raised before
    is_wait: bool = False

    def wait(self) -> None:
        raise AssertionError("a stream's work is waited for by streams")

    def hold(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams")

    def follows(self, other: "Operation") -> bool:
        """True if CUDA's known dependencies order this operation after `other`."""
        seen, left = set[Operation](), [self]
        while left:
            operation = left.pop()
            if operation is other:
                return True
            left += [before for before in operation.after if before not in seen]
            seen.update(operation.after)
        return False


@dataclass(eq=False)
class Answer:
    """End of a relay's step."""

    raised: Operation
    done: Tensor

    def wait(self) -> None:
        raise AssertionError("a relay's step is waited for by streams")

    def hold(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams")


@dataclass
class ImitatedLauncher:
    """Collects the stages of a part after those in `last`. Without flags, the CPU's work is one operation."""

    with_flags: bool = True
    last: dict[Lane, Operation] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def run(
        self, lane: Lane, stage: Stage, work: Callable[[], object], after: Sequence[Signal] = ()
    ) -> Operation:
        return self._add(Operation(lane, stage, work, self._after(lane, after)))

    def host(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        stage, work = task.stage(turn), partial(task.step, turn)
        if task.flags is None:  # a worker's rows, sent by a thread
            return self.run(Lane.SWAP, stage, work, after)
        told_by = TOLD_BY[Lane(task.lane)] if task.lane in TOLD_BY else Lane.TO_HOST  # a worker's attention
        if not self.with_flags:
            if task.ask is not None:
                self.run(told_by, stage, partial(task.ask, turn), after)
            return self.run(told_by, stage, work, after)
        ready = task.flags[READY, turn, :1]
        before = self._after(told_by, after)
        raised = Operation(told_by, NOTHING, lambda: ready.fill_(1), before, flag=ready.data_ptr())
        return Answer(self._add(raised), task.flags[DONE, turn, :1])

    def mark(self) -> Operation:
        return self.run(Lane.DEVICE, NOTHING, lambda: None)

    def wait(self, signals: Sequence[Signal]) -> None:
        if signals:
            self.run(Lane.DEVICE, NOTHING, lambda: None, signals)

    def _add(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        self.last[operation.lane] = operation
        return operation

    def _after(self, lane: Lane, signals: Sequence[Signal]) -> tuple[Operation, ...]:
        others = []
        for signal in signals:
            if isinstance(signal, Answer):
                # An earlier graph precedes this one as a whole.
                asked = (signal.raised,) if signal.raised in self.operations else ()
                done = signal.done
                before = (*asked, *filter(None, (self.last.get(lane),)))
                self._add(
                    Operation(
                        lane,
                        NOTHING,
                        lambda: None,
                        before,
                        lambda done=done: done.item() == 1,  # type: ignore[misc]
                        flag=signal.raised.flag,
                        is_wait=True,
                    )
                )
            else:
                assert isinstance(signal, Operation)
                assert signal in self.operations, "a signal crosses from part to part"
                others.append(signal)
        return (*others, *filter(None, (self.last.get(lane),)))


class ImitatedBackend:
    """Records each section of capturable steps once, like a graph, and then replays its operations.

    The next lane is drawn at random among the runnable ones. So a missing wait shows: sooner or later an
    operation runs too early, on memory that is not ready. Work runs as late as possible, during a wait for
    its program; some work of the next program runs then as well, if that program has started.

    Args:
        num_queues: number of hardware queues, each with its operations in order. An operation enters a random
            queue, in a random order that respects CUDA's known dependencies.
            None: a queue per lane.
        late: lane whose operations run when no other operation can.
    """

    def __init__(
        self,
        seed: int = 0,
        hook: Hook | None = None,
        num_queues: int | None = None,
        late: Lane | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._hook = hook
        self._num_queues, self._late = num_queues, late
        self._seen: set[object] = set()
        self._graphs: dict[tuple[object, int], list[Operation]] = {}
        self._launcher = ImitatedLauncher()
        self._runs: deque[Operation] = deque()  # ends of programs without a wait yet
        self._end: Operation | None = None  # end of the last program
        self._queues: list[list[Operation]] = [[] for _ in range(num_queues or len(LANES))]
        self._done: set[Operation] = set()
        self.num_runs = 0
        self.num_graphs_launched = 0  # in the last program
        self.num_launched = 0  # stages launched one by one in the last program
        self.was_graph = False
        self.num_abandoned = 0
        self.is_closed = False

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    @property
    def num_programs(self) -> int:
        return len({key for key, _ in self._graphs})

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations of the last program, in the order of submission."""
        return self._launcher.operations

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, watch: Watchdog) -> None:
        self.watch = watch

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        self.num_runs += 1
        self.num_graphs_launched = self.num_launched = 0
        self._launcher = launcher = ImitatedLauncher(with_flags)
        if self._end is not None:
            launcher.last = dict.fromkeys(LANES, self._end)
        is_new = program.key not in self._seen
        self._seen.add(program.key)
        parts = sections(program)
        with_graphs = with_graphs and any(can for can, _ in parts)
        self.was_graph = with_graphs and not is_new
        num_graphs = len(self._graphs)
        for number, (can, steps) in enumerate(parts):
            if not self.was_graph or not can:
                before = len(launcher.operations)
                for step in steps:
                    step.submit(launcher)
                self.num_launched += sum(o.stage is not NOTHING for o in launcher.operations[before:])
                continue
            if (program.key, number) not in self._graphs:
                self._graphs[program.key, number] = self._capture(steps)
            self._launch(self._graphs[program.key, number])
            self.num_graphs_launched += 1
        launcher.wait([operation for operation in launcher.last.values() if operation is not self._end])
        self._end = launcher.mark()
        self.enqueue(launcher.operations)
        self._runs.append(self._end)
        return with_graphs and (is_new or len(self._graphs) > num_graphs)

    def _capture(self, steps: Sequence[Step]) -> list[Operation]:
        launcher = ImitatedLauncher(self._launcher.with_flags)
        begin = launcher.mark()
        launcher.last = dict.fromkeys(LANES, begin)
        for step in steps:
            step.submit(launcher)
        launcher.wait([operation for operation in launcher.last.values() if operation is not begin])
        return launcher.operations

    def _launch(self, graph: Sequence[Operation]) -> None:
        known: dict[Operation, Operation] = {}
        launcher = self._launcher
        for operation in graph:
            before = launcher.last.get(Lane.DEVICE) if operation is graph[0] else None
            after = (*(known[each] for each in operation.after), *filter(None, (before,)))
            known[operation] = replace(operation, after=after)
            launcher.operations.append(known[operation])
        launcher.last |= dict.fromkeys(FIXED, known[graph[-1]])

    def wait(self) -> None:
        self._carry_out(self._runs.popleft())

    @torch.inference_mode()
    def _carry_out(self, end: Operation) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while end not in self._done:
            ready = [
                queue
                for queue in self._queues
                if queue and self._done.issuperset(queue[0].after) and queue[0].is_ready()
            ]
            if not ready:
                assert time.monotonic() < deadline, "all lanes wait, and nothing comes"
                time.sleep(0)
                continue
            ready = [queue for queue in ready if queue[0].lane is not self._late] or ready
            operation = self._random.choice(ready).pop(0)
            self._do(operation)
            self._done.add(operation)
        if not self._runs:
            self._done = {end}

    def abandon(self, error: BaseException) -> EngineLostError | None:
        self.num_abandoned += 1
        lost = None if isinstance(error, DeviceStalledError) else error  # flags may have been raised since
        if not isinstance(lost, EngineLostError):
            for end in self._runs:  # later waits find them finished
                self._carry_out(end)
        self._queues = [[] for _ in self._queues]
        self._end, self._done = None, set(self._runs)
        return lost if isinstance(lost, EngineLostError) else None

    def forget(self) -> None:
        self._graphs.clear()
        self._seen.clear()

    def close(self) -> None:
        self.is_closed = True

    def check_flags(self) -> int:
        """Check that known dependencies order each wait after its raise; return the number of waits."""
        num_waits = 0
        operations = self.operations
        raised = {o.flag: o for o in operations if o.flag is not None and not o.is_wait}
        for wait in (o for o in operations if o.is_wait):
            assert wait.flag is not None
            assert wait.follows(raised[wait.flag])
            num_waits += 1
        return num_waits

    def enqueue(self, operations: Sequence[Operation]) -> None:
        if self._num_queues is None:
            for lane, queue in zip(LANES, self._queues, strict=True):
                queue += [o for o in operations if o.lane is lane]
            return
        left = list(operations)
        while left:
            operation = self._random.choice([o for o in left if not any(b in left for b in o.after)])
            self._random.choice(self._queues).append(operation)
            left.remove(operation)

    def _do(self, operation: Operation) -> None:
        if self._hook is not None and operation.stage is not NOTHING:
            self._hook(operation.lane, operation.stage)
        operation.work()


class StallingBackend(ImitatedBackend):
    """A GPU that never signals q, k and v of the second layer; waits for flags end."""

    is_stalling = False

    def enqueue(self, operations: Sequence[Operation]) -> None:
        raised = [o for o in operations if o.flag is not None and not o.is_wait]
        for lost in raised[1:2] if self.is_stalling else ():
            lost.work = lambda: None
        super().enqueue(operations)
