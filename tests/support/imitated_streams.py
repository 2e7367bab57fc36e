"""CUDA streams and graphs without a GPU: work in any order that the streams and their events allow."""

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from neo_desktop.engine.execute.graphs.streams import Lane, Program
from neo_desktop.engine.execute.timeline import Stage

PATIENCE_S = 20.0  # for a flag that must come; only a defect waits for so long

Hook = Callable[[Lane, Stage], None]


@dataclass(eq=False)
class Operation:
    lane: Lane
    carry_out: Callable[[], object]
    after: tuple["Operation", ...]
    is_ready: Callable[[], bool] = lambda: True


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

        marks = tuple(mark for mark in after if isinstance(mark, Operation))
        assert len(marks) == len(after)
        self.operations.append(Operation(lane, carry_out, marks))
        return self.operations[-1]

    def raise_flag(self, lane: Lane, flag: Tensor) -> None:
        self.operations.append(Operation(lane, lambda: flag.fill_(1), ()))

    def wait_for_flag(self, lane: Lane, flag: Tensor) -> None:
        self.operations.append(Operation(lane, lambda: None, (), lambda: flag.item() == 1))


class ImitatedRunner:
    """Records each program once, like a graph, and from then on knows its operations only.

    Which lane goes on is drawn at random among those that can. So a missing wait shows: sooner or later work
    is done too early, on memory that is not ready.
    """

    def __init__(self, seed: int = 0, hook: Hook | None = None) -> None:
        self._random = random.Random(seed)
        self._hook = hook
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

    def wait(self) -> None:
        pass

    def settle(self) -> None:
        self.num_settled += 1

    def forget(self) -> None:
        self._recorded.clear()

    @property
    def num_programs(self) -> int:
        return len(self._recorded)

    def _carry_out(self, operations: Sequence[Operation]) -> None:
        queues = {lane: [o for o in operations if o.lane is lane] for lane in Lane}
        done: set[Operation] = set()
        deadline = time.monotonic() + PATIENCE_S
        while any(queues.values()):
            ready = [
                queue
                for queue in queues.values()
                if queue and done.issuperset(queue[0].after) and queue[0].is_ready()
            ]
            if not ready:
                assert time.monotonic() < deadline, "all lanes wait, and nothing comes"
                time.sleep(0)
                continue
            operation = self._random.choice(ready).pop(0)
            operation.carry_out()
            done.add(operation)
