"""Rank 0's side of tensor parallelism: starts the other ranks' processes and sends them plans."""

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from neo_desktop import native
from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.members import Beginning, Member
from neo_desktop.engine.execute.ranks.process import RankLostError, RankProcess
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.rank import Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 120.0  # timeout of an all-reduce: another rank may compile kernels meanwhile
ANSWER_S = 15.0  # timeout of an answer after an error
EXIT_S = 5.0  # timeout for a process's end after an error
POLL_S = 0.25
_SOMEHOW = SamplingInput(SamplingParams(), 0, 0, 0, IntArray().view(), IntArray().view())


class Driver(Member):
    """Rank 0, and the owner of the other ranks' processes.

    Raises:
        ValueError: The computer has too few GPUs.
    """

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        count = options.tensor_parallel
        visible = [os.environ.copy() for _ in range(count)]
        check_gpus(count, device)
        if device.type == "cuda":
            names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            for variables, name in zip(visible, names, strict=False):
                variables["CUDA_VISIBLE_DEVICES"] = name
        folder = Path(tempfile.mkdtemp(prefix="neo-desktop-ranks-"))
        super().__init__(Rank(0, count), folder, TIMEOUT_S)
        self._threads = torch.get_num_threads(), native.default_num_threads()
        self._num_questions = 0
        self._lock = threading.Lock()
        self._lost: str | None = None
        share_cpus(count)
        rank_options = replace(options, device=device.type, trace_timeline=None)
        limits = [
            (each.mechanism.name, each.level.name, each.reason) for each in fallbacks.states() if each.reason
        ]
        level = max(logging.getLogger().getEffectiveLevel(), logging.WARNING)  # rank 0 logs the rest
        self.processes = [
            RankProcess(
                Beginning(
                    rank_options, Rank(number, count), folder, TIMEOUT_S, list(sys.path), level, limits
                ),
                visible[number],
            )
            for number in range(1, count)
        ]

    def exchange(self, mine: T, combine: Callable[[Sequence[T]], T]) -> T:
        result = combine([mine, *(process.answer() for process in self.processes)])
        self._tell(result)
        return result

    def send(self, message: object) -> None:
        """Send a message to all other ranks.

        Raises:
            RankLostError: The process of a rank has ended.
        """
        if self.has_lost:
            raise self.lost()
        self._tell(message)

    @property
    def has_lost(self) -> bool:
        """True if the process of a rank has ended."""
        return any(process.what_ended() is not None for process in self.processes)

    def have_executed(self) -> bool:
        """Return True if all ranks have executed the plans sent so far, so that the next one can follow."""
        self._num_questions += 1
        self._tell(self._num_questions)
        deadline_s = time.monotonic() + ANSWER_S
        try:
            return all(
                process.answer(max(deadline_s - time.monotonic(), 0.0)) == self._num_questions
                for process in self.processes
            )
        except Exception:  # `lost` reports the cause
            return False

    def lost(self) -> RankLostError:
        """End all other ranks; return the error that ends the engine."""
        with self._lock:
            if self._lost is None:
                self._lost = self._why()
                self.end()
        return RankLostError(self._lost)

    def end(self) -> None:
        """Kill the other ranks' processes, which own no lasting state."""
        for process in self.processes:
            process.end()

    def _why(self) -> str:
        deadline_s = time.monotonic() + EXIT_S
        ended: list[RankProcess] = []
        while not ended and time.monotonic() < deadline_s:
            ended = [each for each in self.processes if each.what_ended(POLL_S) is not None]
        ended.sort(key=lambda each: not each.is_cause)
        for process in ended[:1]:
            if text := process.last_lines():
                logger.error("last output of process %d:\n%s", process.pid, text)
        if not ended:
            numbers = ", ".join(str(each.pid) for each in self.processes)
            return f"the processes of the model's other parts ({numbers}) do not answer"
        return f"{ended[0]} {ended[0].what_ended()}"

    def close(self) -> None:
        """End all other ranks, and restore this process's thread settings."""
        self.end()
        if self.group is not None:
            self.group.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        torch.set_num_threads(self._threads[0])
        native.set_default_num_threads(self._threads[1])

    def _tell(self, message: object) -> None:
        for process in self.processes:
            process.send(message)


class DriverExecutor(Executor):
    """The executor of plans on all ranks; `own` is rank 0's model runner."""

    def __init__(self, own: ModelRunner, leader: Driver) -> None:
        self._own, self._leader = own, leader
        self._is_closed = False
        self.watch(bool)

    def start(self, plan: IterationPlan) -> Wait:
        """Start an iteration on all ranks.

        Raises:
            RankLostError: Another rank has ended or does not answer.
        """
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        self._leader.send(for_other_ranks(plan))
        return partial(self._attempt, self._attempt(partial(self._own.start, plan)))

    def _attempt(self, work: Callable[[], T]) -> T:
        """Run `work`; after a failure, make sure that all ranks have executed the same plans."""
        try:
            return work()
        except Exception as error:
            if self._is_closed:
                raise
            if self._leader.has_lost or not (is_lost(error) or self._leader.have_executed()):
                raise self._leader.lost() from error
            if is_lost(error):
                self._leader.end()
            raise

    def watch(self, alarm: Callable[[], object]) -> None:
        def ended() -> None:
            self._own.give_up()  # a GPU would wait for an all-reduce that never completes
            alarm()

        for process in self._leader.processes:
            process.watch(ended)

    @property
    def loss(self) -> Exception | None:
        return self._leader.lost() if self._leader.has_lost else None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._own.close()
        self._leader.close()


def for_other_ranks(plan: IterationPlan) -> IterationPlan:
    """Return a plan with the same rows, but placeholders for sampling: only rank 0 chooses tokens."""
    return replace(
        plan,
        sub_batches=tuple(SubBatch(tuple(map(_unsampled, batch.sequences))) for batch in plan.sub_batches),
        async_decodes=tuple(
            tuple(each and _unsampled(each) for each in group) for group in plan.async_decodes
        ),
    )


def _unsampled(sequence: ScheduledSequence) -> ScheduledSequence:
    return sequence if sequence.sampling is None else sequence._replace(sampling=_SOMEHOW)


def check_gpus(count: int, device: torch.device) -> None:
    """Raise ValueError if `device` is a GPU and the computer has fewer than `count` GPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise ValueError(
            f"tensor_parallel {count} needs as many GPUs, but this computer has {torch.cuda.device_count()}: "
            "choose a smaller number"
        )


def share_cpus(count: int) -> None:
    """Reduce this process's threads to its share of the CPUs, and leave their placement to the system."""
    torch.set_num_threads(max(torch.get_num_threads() // count, 1))
    native.bind_threads(False)
    native.set_default_num_threads(max(native.default_num_threads() // count, 1))
