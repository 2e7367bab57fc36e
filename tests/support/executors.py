"""Executors for tests, on threads whose stages can be observed and delayed."""

from collections.abc import Callable, Sequence

import torch

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.lane import Lane, Signal, Work
from neo_desktop.engine.execute.lanes import TOLD_BY, CallerLane, Lanes
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.moves import Moves
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.execute.transfers import TransferMemory
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Timeout
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import stages_of
from neo_desktop.models.stages import Stages

MAX_TOKENS, MAX_REQUESTS, MAX_CONTEXT = 256, 8, 512

Hook = Callable[[str, Stage], None]  # called by a lane at the start of a stage


class _HookedThread(ThreadLane):
    def __init__(self, name: str, timeline: Timeline | None, hook: Hook) -> None:
        super().__init__(name, timeline)
        self._hook = hook
        self.num_active = 0

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        def hooked() -> None:
            self.num_active += 1
            try:
                self._hook(self.name, stage)
                work()
            finally:
                self.num_active -= 1

        return super().submit(stage, hooked, after)


class _HookedCaller(CallerLane):
    def __init__(self, timeline: Timeline | None, hook: Hook) -> None:
        super().__init__(timeline)
        self._hook = hook

    def submit(self, stage: Stage, work: Work, after: Sequence[Signal] = ()) -> Signal:
        def hooked() -> None:
            self._hook(Lane.DEVICE, stage)
            work()

        return super().submit(stage, hooked, after)


class HookedLanes(Lanes):
    """Lanes that call a hook at each stage."""

    def __init__(self, hook: Hook, timeline: Timeline | None = None) -> None:
        self._threads: dict[Lane, _HookedThread] = {
            lane: _HookedThread(lane, timeline, hook) for lane in Lane if lane is not Lane.DEVICE
        }
        host = {lane: self._threads[lane] for lane in TOLD_BY}
        work = {lane: thread for lane, thread in self._threads.items() if lane not in host}
        super().__init__(_HookedCaller(timeline, hook), work, host)

    @property
    def num_active(self) -> int:
        """Number of threads inside a stage."""
        return sum(thread.num_active for thread in self._threads.values())


def carry_out_copies(
    config: ModelConfig, dtype: torch.dtype, storage: KVStorage, copies: Sequence[BlockCopy]
) -> None:
    """Copy blocks in all layers, without a GPU."""
    memory = TransferMemory(config, dtype, torch.device("cpu"))
    moves, lanes = Moves(storage.copy_groups(copies), memory), Lanes.threads(None)
    for layer in range(config.num_layers):
        moves.fetch(lanes, layer)
    lanes.join()
    lanes.close()


def thread_executor(
    model: Decoder,
    storage: KVStorage,
    *,
    lanes: Lanes | None = None,
    timeline: Timeline | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    stages: Stages | None = None,
    moves_experts: bool = False,
) -> ModelRunner:
    """Make an executor without a GPU.

    Args:
        stages: stages of the model; None: the usual ones.
    """
    capacity = Capacity.of(MAX_TOKENS, MAX_REQUESTS, MAX_CONTEXT, storage.block_size)
    backend = ThreadBackend(timeline, lanes)
    return ModelRunner(
        stages or stages_of(model, None),
        storage,
        capacity,
        backend,
        timeline=timeline,
        timeout=timeout,
        moves_experts=moves_experts,
    )
