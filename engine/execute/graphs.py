"""Graphs: sections of a program that are captured once and replayed later, without Python between layers.

On a GPU they are CUDA graphs. On a CPU they are recordings of native calls: work that torch computes keeps
its Python function, all other work is repeated in one native call.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from neo_desktop import native
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal, Step, Work
from neo_desktop.engine.execute.timeline import Stage

MAX_GRAPHS = 128  # captured iterations, about 1 MB each; beyond the limit, all are dropped and recaptured


class AnyProgram(Protocol):
    """The interface of a program for backends."""

    @property
    def key(self) -> object:
        """Graph key: programs with equal keys have the same capturable steps."""

    def steps(self) -> Iterable[Step]:
        """Return the steps in order."""


class Graph(Protocol):
    """Captured steps."""

    def replay(self) -> object:
        """Submit the steps' work again."""


G = TypeVar("G", bound=Graph)


def sections(program: AnyProgram) -> list[tuple[bool, Sequence[Step]]]:
    """Return the longest runs of capturable and of other steps, in order."""
    return [(can, tuple(steps)) for can, steps in groupby(program.steps(), lambda step: step.is_capturable)]


class Graphs(Generic[G]):
    """The graphs of programs, by key and number of the section.

    The first program of a key submits its steps one by one, which compiles kernels. From the second program
    on, each section of capturable steps is a graph.

    Args:
        capture: Captures steps, and submits their work.
        forget: Called to drop all graphs when there are too many; calls `clear`.
    """

    def __init__(self, capture: Callable[[Sequence[Step]], G], forget: Callable[[], object]) -> None:
        self._capture, self._forget = capture, forget
        self._seen: set[object] = set()
        self._kept: dict[object, dict[int, G]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all graphs."""
        self._seen.clear()
        self._kept.clear()

    def start(self, program: AnyProgram, launcher: Launcher, *, with_graphs: bool) -> tuple[bool, list[G]]:
        """Submit a program's steps to the launcher, or as graphs.

        Returns:
            True if later programs of its key will be faster, and the program's graphs.
        """
        key, parts = program.key, sections(program)
        with_graphs = with_graphs and any(can for can, _ in parts)
        is_new = key not in self._seen
        is_graph = with_graphs and not is_new
        if with_graphs:
            self._seen.add(key)
        if is_graph and key not in self._kept and len(self._kept) >= MAX_GRAPHS:
            self._forget()
        graphs = self._kept.setdefault(key, {}) if is_graph else {}
        is_new = is_new or (is_graph and not graphs)
        for number, (can, steps) in enumerate(parts):
            if not (is_graph and can):
                for step in steps:
                    step.submit(launcher)
            elif number in graphs:
                graphs[number].replay()
            else:
                graphs[number] = self._capture(steps)
        return with_graphs and is_new, list(graphs.values())


class Recorder(Launcher):
    """The launcher that records steps while another one carries them out; a graph of a CPU.

    Work on the device's lane must depend on the contents of tensors only, as in a CUDA graph. Steps that use
    another lane are submitted again at each replay.
    """

    def __init__(self, launcher: Launcher, steps: Sequence[Step]) -> None:
        self._launcher, self._steps = launcher, steps
        self._parts: list[Work] = []
        self._is_complete = True
        for step in steps:
            step.submit(self)

    def replay(self) -> None:
        if not self._is_complete:
            for step in self._steps:
                step.submit(self._launcher)
            return
        for part in self._parts:
            part()

    def run(self, lane: Lane, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        if lane is Lane.DEVICE:
            return self._launcher.run(lane, stage, partial(self._record, work), after)
        self._is_complete = False
        return self._launcher.run(lane, stage, work, after)

    def host(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        self._is_complete = False
        return self._launcher.host(task, turn, after)

    def mark(self) -> Signal:
        return self._launcher.mark()

    def wait(self, signals: Sequence[Signal]) -> None:
        self._launcher.wait(signals)

    def _record(self, work: Work) -> None:
        calls = native.recorded(work)
        last = self._parts[-1] if self._parts else None
        if calls is None:
            self._parts.append(work)
        elif isinstance(last, native.Recording):
            last.append(calls)
        else:
            self._parts.append(calls)
