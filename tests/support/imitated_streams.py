"""CUDA streams and graphs without a GPU: work in any order that the streams and their events allow."""

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop.engine.execute.graphs.streams import Lane, Program
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.waiting import Watch
from neo_desktop.native.relay import FLAG_INTS

PATIENCE_S = 20.0  # for a flag that must come; only a defect waits for so long

Hook = Callable[[Lane, Stage], None]


@dataclass(eq=False)
class Operation:
    lane: Lane
    carry_out: Callable[[], object]
    after: tuple["Operation", ...]  # the one before it on its lane, and the marks
    is_ready: Callable[[], bool] = lambda: True
    flag: int | None = None  # address of the flag that is raised or waited for
    is_wait: bool = False

    def follows(self, other: "Operation") -> bool:
        """Whether there is a way from `other` to this one along what CUDA is told of."""
        seen, left = set[Operation](), [self]
        while left:
            operation = left.pop()
            if operation is other:
                return True
            left += [before for before in operation.after if before not in seen]
            seen.update(operation.after)
        return False


@dataclass
class ImitatedRecorder:
    operations: list[Operation] = field(default_factory=list)
    hook: Hook | None = None

    def run(
        self, lane: Lane, stage: Stage, work: Callable[[], object], after: Sequence[object] = ()
    ) -> Operation:
        def carry_out() -> None:
            if self.hook is not None:
                self.hook(lane, stage)
            work()

        return self._add(Operation(lane, carry_out, self._after(lane, after)))

    def raise_flag(self, lane: Lane, flag: Tensor) -> Operation:
        return self._add(Operation(lane, lambda: flag.fill_(1), self._after(lane, ()), flag=flag.data_ptr()))

    def wait_for_flag(self, lane: Lane, flag: Tensor, answers: object) -> None:
        self._add(
            Operation(
                lane,
                lambda: None,
                self._after(lane, (answers,)),
                lambda: flag.item() == 1,
                flag=flag.data_ptr(),
                is_wait=True,
            )
        )

    def _add(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        return operation

    def _after(self, lane: Lane, marks: Sequence[object]) -> tuple[Operation, ...]:
        of_others = [mark for mark in marks if isinstance(mark, Operation)]
        assert len(of_others) == len(marks)
        before = next((o for o in reversed(self.operations) if o.lane is lane), None)
        return (*of_others, before) if before is not None else tuple(of_others)


class ImitatedRunner:
    """Records each program once, like a graph, and from then on knows its operations only.

    Which lane goes on is drawn at random among those that can. So a missing wait shows: sooner or later work
    is done too early, on memory that is not ready.

    Args:
        num_queues: a GPU has so many queues, each of which carries out in order what was put into it. Every
            operation goes to one at random, in an order that is drawn among those that CUDA has been told of.
            None: a queue per lane.
    """

    def __init__(self, seed: int = 0, hook: Hook | None = None, num_queues: int | None = None) -> None:
        self._random = random.Random(seed)
        self._hook = hook
        self._num_queues = num_queues
        self._recorded: dict[Hashable, list[Operation]] = {}
        self.num_runs = 0
        self.num_settled = 0

    def start(self, key: Hashable, program: Program) -> None:
        self.num_runs += 1
        if key not in self._recorded:
            recorder = ImitatedRecorder(hook=self._hook)
            program(recorder)
            self._recorded[key] = recorder.operations
        self._carry_out(self._recorded[key])

    def begin(self, watch: Watch) -> None:
        self.watch = watch

    def wait(self) -> None:
        pass

    def settle(self) -> None:
        self.num_settled += 1

    def forget(self) -> None:
        self._recorded.clear()

    def check_flags(self, num_layers: int) -> int:
        """Check that each wait follows its raise along what CUDA is told of; return how many waits there are.

        Args:
            num_layers: of the flags, which lie as `empty_flags` makes them.
        """
        num_waits = 0
        for operations in self._recorded.values():
            raised = {o.flag: o for o in operations if o.flag is not None and not o.is_wait}
            for wait in (o for o in operations if o.is_wait):
                assert wait.flag is not None
                assert wait.follows(raised[wait.flag - num_layers * FLAG_INTS * torch.int32.itemsize])
                num_waits += 1
        return num_waits

    @property
    def num_programs(self) -> int:
        return len(self._recorded)

    def _queues(self, operations: Sequence[Operation]) -> list[list[Operation]]:
        if self._num_queues is None:
            return [[o for o in operations if o.lane is lane] for lane in Lane]
        queues: list[list[Operation]] = [[] for _ in range(self._num_queues)]
        left, placed = list(operations), set[Operation]()
        while left:
            operation = self._random.choice([o for o in left if placed.issuperset(o.after)])
            self._random.choice(queues).append(operation)
            placed.add(operation)
            left.remove(operation)
        return queues

    def _carry_out(self, operations: Sequence[Operation]) -> None:
        queues = self._queues(operations)
        done: set[Operation] = set()
        deadline = time.monotonic() + PATIENCE_S
        while any(queues):
            ready = [
                queue for queue in queues if queue and done.issuperset(queue[0].after) and queue[0].is_ready()
            ]
            if not ready:
                assert time.monotonic() < deadline, "all lanes wait, and nothing comes"
                time.sleep(0)
                continue
            operation = self._random.choice(ready).pop(0)
            operation.carry_out()
            done.add(operation)
