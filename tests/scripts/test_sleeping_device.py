"""The sleeping device runs a program in order, and takes the given time."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.profiling.offload import OffloadTimer
from research.sleeping_device import SleepingDevice

ROOT = Path(__file__).parents[2]
STAGE = Stage("something", 0, NO_SUB_BATCH, 0)


def run(device: SleepingDevice, record: Callable[[Launcher], None]) -> float:
    """Run a program twice, recorded and replayed; return the seconds of the second run."""
    for _ in range(2):
        started = time.perf_counter()
        device.start(SmallProgram("key", record), with_flags=True, with_graphs=True)
        device.wait()
    return time.perf_counter() - started


def test_a_relay_answers_in_the_middle_of_a_program() -> None:
    device = SleepingDevice(lambda lane, work: None)
    with closing(OffloadTimer(torch.device("cpu"), device, in_graph=True)) as offload:
        assert offload.seconds(4096) > 0  # which checks the result


def test_work_begins_when_that_of_its_lane_and_what_it_waits_for_has_ended() -> None:
    done: list[str] = []

    def record(launcher: Launcher) -> None:
        def give(lane: Lane, name: str, after: Sequence[object] = ()) -> object:
            return launcher.run(lane, STAGE, lambda: done.append(name), after)  # type: ignore[arg-type]

        brought = give(Lane.WEIGHTS, "brought")
        give(Lane.DEVICE, "made")
        give(Lane.DEVICE, "multiplied", (brought,))
        give(Lane.TO_HOST, "sent", (launcher.mark(),))

    run(SleepingDevice(lambda lane, work: None), record)
    assert len(done) == 8
    assert set(done[:4]) == {"brought", "made", "multiplied", "sent"}
    for order in (done[:4], done[4:]):
        assert order.index("multiplied") > max(order.index("brought"), order.index("made"))
        assert order[-1] == "sent"


def test_lanes_take_their_time_side_by_side() -> None:
    def record(launcher: Launcher) -> None:
        for lane in (Lane.DEVICE, Lane.WEIGHTS):
            for _ in range(3):
                launcher.run(lane, STAGE, lambda: None)

    lengths = {Lane.DEVICE: 0.02, Lane.WEIGHTS: 0.01}
    taken_s = run(SleepingDevice(lambda lane, work: lengths[lane]), record)
    assert taken_s >= 0.06


@pytest.mark.sample(0)
def test_the_pipeline_is_measured_beside_prediction_and_bound() -> None:
    """The device knows the duration of every piece of work in the engine's own programs."""
    sizes = ["--shape", "smollm2-135m", "--layers", "1", "--weights", "0.3", "--rows", "1", "--repeats", "1"]
    command = [sys.executable, "-m", "research.split_pipeline", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    header, row = (line for line in done.stdout.splitlines() if line.startswith(("| weights", "| 30%")))
    assert header.count("|") == row.count("|")
    assert float(row.split("|")[3]) > 0.01  # ms, for 7 MB of weights
