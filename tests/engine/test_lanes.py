"""Lanes keep their order, wait for each other, and never leave a caller waiting."""

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from neo_desktop.engine.cuda.errors import StageStalledError
from neo_desktop.engine.execute.lane import HostTask, Lane, Work
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.thread_lane import ThreadLane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.watchdog import Watchdog

STAGE = Stage("work", 0, 0, 1)
TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long


def task(work: Work, stage: Stage = STAGE) -> HostTask:
    return HostTask(Lane.CPU, lambda _: stage, lambda _: work())


def threads_of_lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("neo-desktop-")}


def test_a_lane_keeps_the_order_of_its_tasks() -> None:
    lane, done = ThreadLane("a"), []
    for number in range(100):
        last = lane.submit(STAGE, lambda number=number: done.append(number))
    last.wait()
    assert done == list(range(100))
    lane.close()


def test_what_depends_on_a_failed_task_fails_with_its_error_and_does_not_run() -> None:
    first, second, ran = ThreadLane("a"), ThreadLane("b"), []
    error = ValueError("broken")

    def fail() -> None:
        raise error

    failed = first.submit(STAGE, fail)
    dependent = second.submit(STAGE, lambda: ran.append("dependent"), (failed,))
    later = second.submit(STAGE, lambda: ran.append("later"), (dependent,))
    independent = first.submit(STAGE, lambda: ran.append("independent"))
    for signal in (failed, dependent, later):
        with pytest.raises(ValueError, match="broken") as caught:
            signal.wait()
        assert caught.value is error
    independent.wait()
    assert ran == ["independent"]
    with pytest.raises(ValueError, match="broken"):
        first.join()
    first.close()
    second.close()


def test_after_abandoning_nothing_runs_any_more_and_the_lanes_can_be_used_again() -> None:
    lanes = Lanes.threads(None)
    begun, gate, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert gate.wait(TIMEOUT_S)
        ran.append("slow")

    running = lanes.run(Lane.TO_HOST, STAGE, slow)
    lanes.host(task(lambda: ran.append("waiting")), 0, (running,))
    queued = lanes.run(Lane.TO_HOST, STAGE, lambda: ran.append("queued"))
    behind = lanes.run(Lane.SWAP, STAGE, lambda: ran.append("behind"), (queued,))
    assert begun.wait(TIMEOUT_S)
    threading.Timer(0.05, gate.set).start()
    lanes.abandon()
    assert ran[0] == "slow"
    assert "queued" not in ran
    assert "behind" not in ran
    for signal in (queued, behind):
        with pytest.raises(CancelledError):
            signal.wait()
    waiting_ran = len(ran)
    lanes.host(task(lambda: ran.append("new")), 0).wait()
    assert ran[waiting_ran:] == ["new"]
    lanes.join()
    lanes.close()


def test_closing_ends_all_threads_and_whoever_waits_for_dropped_tasks() -> None:
    others = threads_of_lanes()
    lanes = Lanes.threads(None)
    begun, gate = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert gate.wait(TIMEOUT_S)

    running = lanes.run(Lane.TO_DEVICE, STAGE, slow)
    queued = lanes.run(Lane.TO_DEVICE, STAGE, lambda: None)
    lanes.host(task(lambda: None), 0, (queued,))
    lanes.run(Lane.SWAP, STAGE, lambda: None, (running,))
    assert begun.wait(TIMEOUT_S)
    threading.Timer(0.05, gate.set).start()
    assert len(threads_of_lanes() - others) == 3
    lanes.close()
    assert not threads_of_lanes() - others
    with pytest.raises(CancelledError):
        queued.wait()
    with pytest.raises(RuntimeError):
        lanes.host(task(lambda: None), 0)
    lanes.close()  # a second close does nothing
    lanes.abandon()  # the thread of a closed iteration does this


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads a thread's CPU time from /proc")
def test_an_idle_lane_uses_no_cpu() -> None:
    lane, ids = ThreadLane("a"), []
    lane.submit(STAGE, lambda: ids.append(threading.get_native_id())).wait()
    lane.join()

    def ticks() -> list[str]:
        fields = Path(f"/proc/self/task/{ids[0]}/stat").read_text().rpartition(")")[2].split()
        return fields[11:13]  # user and system time

    time.sleep(0.05)
    before = ticks()
    time.sleep(0.3)
    assert ticks() == before
    lane.close()


def test_a_stage_that_never_ends_is_named_and_holds_nobody_up() -> None:
    lanes, gate, other, ran = Lanes.threads(None), threading.Event(), threading.Event(), []
    lanes.begin(Watchdog(0.4, predicted_ms=12))
    stuck = lanes.host(task(gate.wait, Stage("CPU attention", 3, 1, 7)), 0)
    dependent = lanes.run(Lane.TO_DEVICE, STAGE, lambda: ran.append("dependent"), (stuck,))
    lanes.run(Lane.SWAP, STAGE, other.set)
    expected = (
        "the CPU did not end 'CPU attention' in layer 3 of sub-batch 1 (thread 'cpu') within 0.4 s; the "
        "whole iteration should take 12 ms; a thread cannot be stopped, and the engine must be started again"
    )
    for wait in (lanes.join, stuck.wait, dependent.wait):
        with pytest.raises(StageStalledError) as caught:
            wait()
        assert str(caught.value) == expected
    assert str(lanes.abandon(caught.value)) == expected
    assert other.wait(TIMEOUT_S)
    assert not ran
    lanes.close()
    gate.set()


def test_patience_begins_anew_with_every_stage_of_any_lane() -> None:
    lanes, gate = Lanes.threads(None), threading.Event()
    lanes.begin(Watchdog(3.0))
    lanes.host(task(gate.wait), 0)
    for _ in range(4):
        lanes.run(Lane.SWAP, STAGE, lambda: time.sleep(1.0))  # together longer than the timeout
    lanes.run(Lane.SWAP, STAGE, gate.set)
    lanes.join()
    lanes.close()


def test_a_program_that_forgets_to_close_idle_and_stuck_lanes_ends() -> None:
    program = (
        "import threading\n"
        "from neo_desktop.engine.execute.thread_lane import ThreadLane\n"
        "from neo_desktop.engine.execute.timeline import Stage\n"
        "idle, stuck, begun = ThreadLane('a'), ThreadLane('b'), threading.Event()\n"
        "idle.submit(Stage('work', 0, 0, 1), lambda: print('ran')).wait()\n"
        "stuck.submit(Stage('work', 0, 0, 1), lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()\n"
        "print('end')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert (ended.stdout, ended.stderr) == ("ran\nend\n", "")
