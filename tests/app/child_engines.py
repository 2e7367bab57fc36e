"""Engines in a child process, which break there when a prompt asks for it."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.engines.service import EngineService
from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.progress import Progress

from .fake_engine import FakeExecutor, make_engine

# The first token of a prompt decides the fate of the process.
KILLED, SEGFAULT, LOST, HUNG = 1, 2, 3, 4
FOREVER_S = 3600.0


class FragileExecutor(FakeExecutor):
    """Executor with iterations of 1 ms; special prompts break it in their second iteration."""

    def start(self, plan: IterationPlan) -> Wait:
        return partial(self._break_or_go_on, plan)

    def _break_or_go_on(self, plan: IterationPlan) -> IterationResult:
        for sequence in plan.sequences:
            prompt = self.prompts.get(sequence.request_id)
            if prompt is not None:
                _obey(prompt[0])
        time.sleep(0.001)
        return self._carry_out(plan)


def _obey(token: int) -> None:
    if token == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if token == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    if token == LOST:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    if token == HUNG:
        time.sleep(FOREVER_S)


@dataclass(frozen=True)
class Fragile:
    """Factory of fragile engines, controlled by files in `folder`.

    Loading waits while the file `hold` exists, ends the process if `die` exists and fails if `refuse` exists.
    Each load appends a line to `loads`: the loading process's PID.
    """

    name: str
    folder: Path

    def __call__(self, progress: Progress) -> Engine:
        with (self.folder / "loads").open("a") as file:
            file.write(f"{os.getpid()}\n")
        progress(0.25, "Loading weights")
        while (self.folder / "hold").exists():
            time.sleep(0.005)
        if (self.folder / "die").exists():
            os._exit(3)
        if (self.folder / "refuse").exists():
            raise ValueError("the checkpoint is missing")
        engine = make_engine(FragileExecutor(), num_blocks=8192, context_tokens=100_000)
        engine.model_name = self.name
        return engine


@dataclass(frozen=True)
class FragileLoader:
    """`Loader` of fragile engines."""

    folder: Path
    make_service: Callable[[EngineProcess], EngineService] = EngineService

    def __call__(self, name: str, progress: Progress) -> EngineService:
        return self.make_service(EngineProcess.load(Fragile(name, self.folder), progress))

    @property
    def pids(self) -> list[int]:
        """PIDs of the started processes, in order."""
        return [int(line) for line in (self.folder / "loads").read_text().split()]

    def now(self, what: str, *, is_so: bool = True) -> None:
        """Create this file, or delete it."""
        if is_so:
            (self.folder / what).touch()
        else:
            (self.folder / what).unlink()
