"""Programs on a GPU with few hardware queues, each of which runs its entries strictly in order.

CUDA puts streams, and nodes of a graph, into any queue, in any order that the dependencies allow.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from imitated_device import ImitatedDevice, needs_imitated_gpu
from torch import Tensor

from neo_desktop.engine.cuda.errors import DeviceLostError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute import stream_lane
from neo_desktop.engine.execute.backend import StreamBackend
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.round_trips import SmallProgram, nothing
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.native.relay import empty_flags

pytestmark = needs_imitated_gpu
NUM_STEPS = 4
READY, DONE = 0, 1


def backend() -> StreamBackend:
    return StreamBackend(Streams(torch.device("cuda")), None)


def question_and_answer(flags: Tensor, seen: Tensor) -> SmallProgram:
    """Ask the host in each step, and record the arrival of its answer.

    Args:
        flags: [2, NUM_STEPS, ints] in pinned memory.
        seen: [NUM_STEPS] on the device.
    """

    def record(launcher: Launcher) -> None:
        arrived: tuple[Signal, ...] = ()
        task = HostTask(Lane.CPU, partial(Stage, "step", sub_batch=0, tokens=1), nothing, flags)
        for step in range(NUM_STEPS):
            stage = task.stage(step)
            asked = launcher.run(Lane.DEVICE, stage, seen[step].zero_, arrived)
            answered = launcher.host(task, step, (asked,))
            arrived = (launcher.run(Lane.TO_DEVICE, stage, partial(seen[step].fill_, 1), (answered,)),)
        launcher.wait(arrived)

    return SmallProgram("program", record)


def run(runs: StreamBackend, program: SmallProgram) -> None:
    with runs.on_device():
        runs.start(program, with_flags=True, with_graphs=True)
    runs.wait()


@contextmanager
def answering(flags: Tensor) -> Iterator[None]:
    """Answer like the relay: in order, each question once it is asked."""
    is_over = threading.Event()

    def answer() -> None:
        asked, done = flags[READY, :, 0], flags[DONE, :, 0]
        while not is_over.is_set():
            for step in range(NUM_STEPS):
                if not asked[step]:
                    break
                done[step] = 1
            time.sleep(0)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("num_queues", range(1, 9))
def test_with_the_answer_after_its_question_no_number_of_queues_hangs(
    imitated: ImitatedDevice, num_queues: int
) -> None:
    flags, seen = empty_flags(NUM_STEPS, pinned=True), torch.zeros(NUM_STEPS, device="cuda")
    for seed in range(5):
        imitated.set_queues(num_queues, seed)
        runs = backend()
        for _ in range(3):  # eager, captured, and replayed
            flags.zero_()
            with answering(flags):
                run(runs, question_and_answer(flags, seen))
            assert seen.tolist() == [1] * NUM_STEPS
    assert imitated.num_deadlocks == 0


@pytest.mark.parametrize("num_queues", [1, 2, 3])
def test_an_answer_that_cuda_takes_for_independent_hangs_and_that_is_told(
    imitated: ImitatedDevice,
    num_queues: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold(answer: stream_lane._Flag, stream: torch.cuda.Stream) -> None:
        stream_lane.stream_wait_value(stream, answer._done)  # without the dependency on the question

    monkeypatch.setattr(stream_lane._Flag, "hold", hold)
    flags, seen = empty_flags(NUM_STEPS, pinned=True), torch.zeros(NUM_STEPS, device="cuda")
    lost: DeviceLostError | None = None
    for seed in range(20):
        imitated.set_queues(num_queues, seed)
        imitated.set_timeout(2.0)
        runs = backend()
        try:
            for _ in range(3):
                flags.zero_()
                with answering(flags):
                    run(runs, question_and_answer(flags, seen))
        except DeviceLostError as error:
            lost = error
            break
    assert "the launch timed out" in str(lost)
    assert imitated.num_deadlocks == 1
    told = capfd.readouterr().err
    assert "a deadlock: nothing has been able to run" in told
    assert "holds 'wait value', for which nothing has been written" in told
