"""Copies of streamed KV as the profiler times them: one direction, and both at once."""

import threading
from contextlib import closing

import pytest
import torch
from executors import HookedLanes

from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.profiling.copy_timer import SwapCopies
from neo_desktop.engine.watchdog import Watchdog

TIMEOUT_S = 20.0  # for prompt events; only a defect waits this long
CPU = torch.device("cpu")


@pytest.mark.parametrize("lanes", [(Lane.SWAP_IN,), (Lane.SWAP_OUT,), (Lane.SWAP_IN, Lane.SWAP_OUT)], ids=len)
def test_each_way_copies_its_rows_and_neither_waits_for_the_other(lanes: tuple[Lane, ...]) -> None:
    begun: dict[str, threading.Event] = {lane: threading.Event() for lane in lanes}

    def meet(lane: str, stage: Stage) -> None:
        if lane in begun:
            begun[lane].set()
            for other in begun.values():
                assert other.wait(TIMEOUT_S)

    kv = torch.zeros(2, 8, 2, 4)
    copies = SwapCopies(kv, CPU)
    with closing(ThreadBackend(None, HookedLanes(meet))) as backend:
        backend.begin(Watchdog(TIMEOUT_S))
        backend.start(SmallProgram("measured", copies.ways(lanes)), with_flags=False, with_graphs=False)
        backend.wait()
    assert bool((kv[0] == 1).all()) == (Lane.SWAP_IN in lanes)
    assert not kv[1].any()
    _, home = copies._homes
    assert bool((home == 0).flatten(1).all(1).any()) == (Lane.SWAP_OUT in lanes)
