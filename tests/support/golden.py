"""Programs as text: the stages per lane, in order, and the stages of other lanes they wait for.

    cd tests/support; python golden.py DIR

writes one record per kind of program to a file. Run it on two commits and compare the folders to see the
changes. `tests/engine/golden.json` keeps a digest per kind.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_case import AsyncIterations
from executors import thread_executor
from expert_models import expert_model
from pipeline_case import BLOCK_SIZE, RandomIterations, check_result, make_storage, tiny_model
from split_models import split_model
from workers import running_worker, with_workers

from neo_desktop.engine.execute.lane import HostTask, Lane, Signal, Work
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24
NUM_PLANS = 10  # maximum per case


@dataclass
class Record:
    """Stages of one iteration, in the order of submission to lanes."""

    lanes: list[str] = field(default_factory=list)  # lane per stage
    stages: list[Stage] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)  # stages that end before this one begins

    def add(self, lane: str, stage: Stage, after: set[int]) -> int:
        """Append a stage that waits for its lane and for the stages `after`; return its number."""
        last = max((i for i, each in enumerate(self.lanes) if each == lane), default=None)
        direct = after | ({last} if last is not None else set())
        self.lanes.append(lane)
        self.stages.append(stage)
        self.before.append(direct.union(*(self.before[i] for i in direct)))
        return len(self.stages) - 1

    def lines(self) -> Iterator[str]:
        """Yield a line per stage, by lane. Waits that other waits imply are left out."""
        numbers: dict[str, list[int]] = defaultdict(list)
        names = []
        for index, lane in enumerate(self.lanes):
            names.append(f"{lane}#{len(numbers[lane])}")
            numbers[lane].append(index)
        for lane in sorted(numbers):
            for index in numbers[lane]:
                known = set().union(*(self.before[i] for i in self.before[index]))
                needed = sorted(names[i] for i in self.before[index] - known if self.lanes[i] != lane)
                stage = self.stages[index]
                where = f"{stage.layer} {stage.sub_batch} {stage.tokens}"
                yield f"{names[index]} {stage.name!r} {where}" + (f" < {' '.join(needed)}" if needed else "")


class RecordingLanes(Lanes):
    """Lanes on threads that record every iteration."""

    def __init__(self, *lanes: Any) -> None:
        super().__init__(*lanes)
        self.record = Record()
        self._numbers: dict[int, int] = {}  # by identity of the signal
        self._signals: list[Signal] = []  # kept alive, so identities stay unique
        self._awaited: set[int] = set()  # stages that the device's next stage waits for

    def restart(self) -> Record:
        """Return the record of the finished iteration, and start a new one."""
        record, self.record = self.record, Record()
        self._numbers, self._signals, self._awaited = {}, [], set()
        return record

    def _add(self, lane: str, stage: Stage, after: Sequence[Signal], signal: Signal) -> Signal:
        before = {self._numbers[id(each)] for each in after if id(each) in self._numbers}
        if lane == Lane.DEVICE:
            before |= self._awaited
            self._awaited = set()
        return self._keep(signal, self.record.add(lane, stage, before))

    def _keep(self, signal: Signal, number: int) -> Signal:
        self._numbers[id(signal)] = number
        self._signals.append(signal)
        return signal

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        return self._add(lane, stage, after, _Own(super().run(lane, stage, work, after)))

    def host(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        return self._add(task.lane, task.stage(turn), after, _Own(super().host(task, turn, after)))

    def mark(self, what: str = "") -> Signal:
        signal = _Own(super().mark(what))
        last = max((i for i, lane in enumerate(self.record.lanes) if lane == Lane.DEVICE), default=None)
        return signal if last is None else self._keep(signal, last)

    def wait(self, signals: Sequence[Signal]) -> None:
        self._awaited |= {self._numbers[id(each)] for each in signals if id(each) in self._numbers}
        super().wait(signals)


class _Own:
    """A signal that no other stage shares."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.wait, self.hold = signal.wait, signal.hold


@dataclass(frozen=True)
class Case:
    """Random iterations of a model, and the reference model for their tokens."""

    iterations: RandomIterations
    model: Decoder
    expected: Decoder
    tiers: tuple[KVTier, ...] = MEASURED_TIERS
    num_workers: int = 0

    def records(self) -> Iterator[str]:
        """Run the iterations, check their tokens, and yield a record per iteration."""
        with ExitStack() as stack:
            storage = make_storage(self.model, dict.fromkeys(self.tiers, NUM_BLOCKS))
            if self.num_workers:
                addresses = [stack.enter_context(running_worker())[1] for _ in range(self.num_workers)]
                here = {tier: storage[tier] for tier in storage.tiers}
                storage = KVStorage(with_workers(self.model, here, addresses, NUM_BLOCKS, BLOCK_SIZE))
            lanes = RecordingLanes.threads(None)
            executor = thread_executor(self.model, storage, lanes=lanes)
            stack.callback(executor.close)
            for plan, contexts in self.iterations.plans(NUM_PLANS):
                result = executor.execute(plan)
                check_result(self.expected, plan, contexts, result)
                self.iterations.take_in(result)
                yield "\n".join(lanes.restart().lines())


def _plain(seed: int) -> Case:
    model = tiny_model()
    return Case(RandomIterations(seed, NUM_BLOCKS), model, model)


def _device_alone(seed: int) -> Case:
    model, tiers = tiny_model(), (KVTier.DEVICE,)
    return Case(RandomIterations(seed, NUM_BLOCKS, tiers), model, model, tiers)


def _streamed(seed: int) -> Case:
    model = tiny_model((None, 11, None, 3, None, None))
    return Case(RandomIterations(seed, NUM_BLOCKS, ALL_TIERS), model, model, ALL_TIERS)


def _async(seed: int) -> Case:
    model = tiny_model(attention_sinks=True, softcap=0.5)
    return Case(AsyncIterations(seed, NUM_BLOCKS), model, model)


def _offloaded(seed: int) -> Case:
    return Case(RandomIterations(seed, NUM_BLOCKS), split_model(seed), tiny_model())


def _experts(seed: int) -> Case:
    return Case(RandomIterations(seed, NUM_BLOCKS), expert_model(seed), expert_model())


def _workers(seed: int) -> Case:
    model = tiny_model()
    tiers = (*MEASURED_TIERS, KVTier.worker(1), KVTier.worker(2))
    return Case(RandomIterations(seed, NUM_BLOCKS, tiers), model, model, MEASURED_TIERS, 2)


def _async_offloaded(seed: int) -> Case:
    return Case(AsyncIterations(seed, NUM_BLOCKS), split_model(seed), tiny_model())


KINDS: Mapping[str, Callable[[int], Case]] = {
    "device and host": _plain,
    "device alone": _device_alone,
    "streamed KV": _streamed,
    "async decodes": _async,
    "offloaded weights": _offloaded,
    "experts in host memory": _experts,
    "workers": _workers,
    "async decodes, offloaded weights": _async_offloaded,
}


def digest(records: Sequence[str]) -> str:
    """Return a hash of the records."""
    return hashlib.sha256("\n\n".join(records).encode()).hexdigest()[:16]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for kind, make in KINDS.items():
        (folder / f"{kind}.txt").write_text("\n\n".join(make(7).records()) + "\n")
