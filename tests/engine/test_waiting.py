"""Every wait for the GPU or a thread ends."""

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from fake_cuda import accelerator_error

from neo_desktop.engine.cuda.copies import wait_for_gpu
from neo_desktop.engine.cuda.errors import DeviceLostError, DeviceStalledError, is_lost
from neo_desktop.engine.execute.lane import HostTask, Lane
from neo_desktop.engine.execute.lanes import TOLD_BY, Lanes
from neo_desktop.engine.execute.stream_lane import Tape
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.watchdog import Timeout, Watchdog

GPU = torch.device("cuda")


class FakeStream:
    """A stream whose work ends on a query, except work added after `hangs` was set."""

    def __init__(self) -> None:
        self.hangs = False
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return not self.hangs

    def record_event(self) -> "FakeEvent":
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: "FakeEvent") -> None:
        self.hangs = self.hangs or event.hangs


class FakeEvent:
    hangs = False

    def record(self, stream: FakeStream) -> None:
        self.hangs = stream.hangs

    def query(self) -> bool:
        return not self.hangs


class Queries:
    """A sequence of CUDA's answers to queries; the last answer repeats."""

    def __init__(self, *answers: bool | Exception) -> None:
        self._answers = list(answers)

    def query(self) -> bool:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_gpu_that_never_answers_is_given_up_in_words() -> None:
    with pytest.raises(DeviceStalledError) as caught:
        wait_for_gpu(Queries(False).query, Watchdog(0.2, predicted_ms=7), "'linear' in layer 3")
    assert str(caught.value) == (
        "the GPU did not end 'linear' in layer 3 within 0.2 s; the whole iteration should take 7 ms; it no "
        "longer answers, and the engine must be started again"
    )


def test_an_error_that_the_gpu_does_not_come_back_from_is_told_as_such() -> None:
    error = accelerator_error("CUDA error: an illegal memory access was encountered", 700)
    with pytest.raises(DeviceLostError, match="an illegal memory access was encountered"):
        wait_for_gpu(Queries(False, error).query, Watchdog(9))


def test_patience_grows_with_what_an_iteration_should_take() -> None:
    assert Timeout(30, 20).watch(12).timeout_s == 30
    assert Timeout(30, 20).watch(5000).timeout_s == 100


def test_time_in_which_nobody_could_look_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process or a virtual machine makes the clock jump between two queries."""
    jumps = 3
    monotonic = time.monotonic
    passed_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s)

    def is_done() -> bool:
        nonlocal passed_s, jumps
        passed_s += 1000.0
        jumps -= 1
        return jumps == 0

    assert Watchdog(60.0).wait_until(is_done)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Replace torch's streams and events; return the current stream."""
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return current


def stage(name: str, layer: int) -> Stage:
    return Stage(name, layer, NO_SUB_BATCH, 1)


def nothing() -> None:
    pass


def gpu_lanes() -> tuple[Lanes, dict[Lane, FakeStream]]:
    streams = {lane: FakeStream() for lane in Lane if lane not in TOLD_BY}
    lanes = Lanes.streams(streams, None, Tape(), with_flags=False)  # type: ignore[arg-type]
    lanes.begin(Watchdog(0.3))
    return lanes, streams


def hang(stream: FakeStream) -> Callable[[], None]:
    return lambda: setattr(stream, "hangs", True)


def test_the_stage_at_which_the_gpu_hangs_is_named(cuda: FakeStream) -> None:
    lanes, streams = gpu_lanes()
    device = streams[Lane.DEVICE]
    for layer in range(4):
        lanes.run(Lane.DEVICE, stage("linear", layer), hang(device) if layer == 2 else nothing)
    with pytest.raises(DeviceStalledError, match="the GPU did not end 'linear' in layer 2 within") as caught:
        lanes.join()
    assert "'linear' in layer 2" in str(lanes.abandon(caught.value))
    lanes.close()


def test_a_thread_that_waits_for_a_gpu_that_hangs_says_so(cuda: FakeStream) -> None:
    """The CPU's attention waits for q, k and v: the error names the GPU, not the thread."""
    lanes, streams = gpu_lanes()
    sent = lanes.run(Lane.TO_HOST, stage("q, k, v", 1), hang(streams[Lane.TO_HOST]))
    task = HostTask(Lane.CPU, lambda layer: stage("CPU attention", layer), lambda _: None)
    attended = lanes.host(task, 1, (sent,))
    with pytest.raises(DeviceStalledError, match="'q, k, v' in layer 1"):
        attended.wait()
    lanes.close()


def test_a_swap_that_hangs_on_the_gpu_is_named(cuda: FakeStream) -> None:
    lanes, streams = gpu_lanes()
    lanes.run(Lane.SWAP, stage("copy blocks", 0), hang(streams[Lane.SWAP]))
    with pytest.raises(DeviceStalledError, match="'copy blocks' in layer 0") as caught:
        lanes.join()
    assert is_lost(caught.value)
    lanes.close()
