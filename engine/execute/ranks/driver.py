"""Rank 0's side: starts the processes of the other ranks, and tells them what to execute."""

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from neo_desktop import native
from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.ranks.messages import (
    Agreed,
    Beginning,
    Fitting,
    Join,
    Loaded,
    Question,
    Ready,
)
from neo_desktop.engine.execute.ranks.plans import PlanWriter
from neo_desktop.engine.execute.ranks.process import EXIT_S, RankLostError, RankProcess
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.rank import Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 120.0  # with a sum: kernels may be compiled by one rank meanwhile
ANSWER_S = 15.0  # with an answer, once something has gone wrong
POLL_S = 0.25


class Driver:
    """The other ranks, as rank 0 sees them; also a `Member` itself.

    Args:
        options: of the engine.
        device: of this rank.

    Raises:
        ValueError: there are too few GPUs.
    """

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        count = options.tensor_parallel
        self.rank = Rank(0, count)
        visible = [os.environ.copy() for _ in range(count)]
        check_gpus(count, device)
        if device.type == "cuda":
            names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            for variables, name in zip(visible, names, strict=False):
                variables["CUDA_VISIBLE_DEVICES"] = name
        self._folder = Path(tempfile.mkdtemp(prefix="neo-desktop-ranks-"))
        self._threads = torch.get_num_threads(), native.default_num_threads()
        self.group: Group | None = None  # once it is made
        self._num_questions = 0
        self._lock = threading.Lock()
        self._lost: str | None = None
        share_cpus(count)
        of_others = replace(options, device=device.type, trace_timeline=None)
        limits = [
            (each.mechanism.name, each.level.name, each.reason) for each in fallbacks.states() if each.reason
        ]
        level = max(logging.getLogger().getEffectiveLevel(), logging.WARNING)  # rank 0 has told the rest
        self.processes = [
            RankProcess(
                Beginning(
                    of_others,
                    Rank(number, count),
                    self._folder,
                    TIMEOUT_S,
                    list(sys.path),
                    level,
                    limits,
                ),
                visible[number],
            )
            for number in range(1, count)
        ]

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Member`; `close` leaves the group."""
        for process in self.processes:
            theirs = process.answer(Loaded).dtype
            if theirs != str(dtype):
                raise RuntimeError(
                    f"parts of the model were loaded in {dtype} and {theirs}: choose a --dtype"
                )
        self._tell(Join())
        self.group = Group(self.rank, self._folder, device, TIMEOUT_S)

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        everywhere = [fitting, *(process.answer(Fitting).blocks for process in self.processes)]
        least = {tier: min(blocks[tier] for blocks in everywhere) for tier in fitting}
        self._tell(Agreed(least))
        return least

    def check_ready(self) -> None:
        """Wait until all are ready for plans."""
        for process in self.processes:
            process.answer(Ready)

    def send(self, message: object) -> None:
        """Tell all of them something.

        Raises:
            RankLostError: one of them is gone.
        """
        if self.has_lost:
            raise self.lost()
        self._tell(message)

    @property
    def has_lost(self) -> bool:
        """Whether one of them is gone."""
        return any(process.what_ended() is not None for process in self.processes)

    def have_executed(self) -> bool:
        """Whether all have executed the plans that they were told of: then the next one can follow."""
        self._num_questions += 1
        question = Question(self._num_questions)
        self._tell(question)
        deadline_s = time.monotonic() + ANSWER_S
        try:
            return all(
                process.answer(Question, max(deadline_s - time.monotonic(), 0.0)) == question
                for process in self.processes
            )
        except Exception:  # what it was is found in `lost`
            return False

    def lost(self) -> RankLostError:
        """End all of them; return why nothing can be computed any more."""
        with self._lock:
            if self._lost is None:
                self._lost = self._why()
                self.end()
        return RankLostError(self._lost)

    def end(self) -> None:
        """End all of them: they have nothing that is to be kept."""
        for process in self.processes:
            process.end()

    def _why(self) -> str:
        deadline_s = time.monotonic() + EXIT_S
        ended: list[RankProcess] = []
        while not ended and time.monotonic() < deadline_s:
            ended = [each for each in self.processes if each.what_ended(POLL_S) is not None]
        ended.sort(key=lambda each: not each.is_cause)
        for process in ended[:1]:
            process.log_last_lines()
        if not ended:
            numbers = ", ".join(str(each.pid) for each in self.processes)
            return f"the processes that have the other parts of the model ({numbers}) do not answer"
        return f"{ended[0]} {ended[0].what_ended()}"

    def close(self) -> None:
        """End all of them, and leave this process as it was."""
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
    """Executes plans on all ranks.

    Args:
        own: of rank 0.
        leader: the others.
    """

    def __init__(self, own: ModelRunner, leader: Driver) -> None:
        self._own, self._leader = own, leader
        self._writer = PlanWriter()
        self._is_closed = False
        self.watch(bool)

    def start(self, plan: IterationPlan) -> Wait:
        """See `Executor`.

        Raises:
            RankLostError: another rank is gone, or does not answer.
        """
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        self._leader.send(self._writer.told(plan))
        return partial(self._end, self._attempt(partial(self._own.start, plan)))

    def _end(self, wait: Wait) -> IterationResult:
        return self._attempt(wait)

    def _attempt(self, work: Callable[[], T]) -> T:
        """Do something; if it fails, all ranks have to be where this one is."""
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
        """See `Executor`, likewise the others."""

        def ended() -> None:
            self._own.give_up()  # a GPU would wait for a sum that does not come
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


def check_gpus(count: int, device: torch.device) -> None:
    """Raise ValueError unless there are so many GPUs, if the device is one."""
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise ValueError(
            f"tensor_parallel {count} needs as many GPUs, but there are {torch.cuda.device_count()}: choose "
            "a smaller number"
        )


def share_cpus(count: int) -> None:
    """Take a share of the CPUs for this process's threads, which go where the system puts them."""
    torch.set_num_threads(max(torch.get_num_threads() // count, 1))
    native.bind_threads(False)
    native.set_default_num_threads(max(native.default_num_threads() // count, 1))
