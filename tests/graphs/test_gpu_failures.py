"""An engine on a failing GPU: the right tokens in the end, or an error to every request."""

import pytest
import torch
from fallback_levels import kernels_on
from imitated_device import (
    ALWAYS,
    ILLEGAL_ADDRESS,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    ImitatedDevice,
    needs_imitated_gpu,
)
from tiny_engine import PARAMS, PROMPTS, Tokens, engine, tokens_of

from neo_desktop import Engine
from neo_desktop.engine.cuda.errors import DeviceLostError, DeviceStalledError, StreamMemoryError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.doctor.outcome import CheckError
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.execute import stream_lane
from neo_desktop.engine.execute.backend import StreamBackend
from neo_desktop.engine.execute.build import check_flags
from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.selfcheck.kernel_checks import kernel_checks
from neo_desktop.engine.selfcheck.rig import Rig
from neo_desktop.engine.watchdog import Timeout

EXECUTOR = "neo_desktop.engine.execute.model_runner"
FOREVER_S = 3600.0


@pytest.fixture(scope="module")
def expected() -> Tokens:
    """The CPU's tokens."""
    with engine("gpu-only", device="cpu") as on_cpu:
        return tokens_of(on_cpu)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pause after a failed graph, so that tests see graphs return."""
    monkeypatch.setattr(f"{EXECUTOR}.PAUSE_ITERATIONS", 2)


pytestmark = needs_imitated_gpu


@pytest.mark.parametrize("call", ["cudaGraphInstantiate", "cudaGraphLaunch"])
@pytest.mark.parametrize(("policy", "times"), [("gpu-only", 1), ("fastdecode", 1), ("fastdecode", ALWAYS)])
def test_without_memory_for_graphs_the_tokens_are_the_same(
    imitated: ImitatedDevice, expected: Tokens, policy: str, call: str, times: int
) -> None:
    with engine(policy) as made:
        imitated.fail(call, OUT_OF_MEMORY, times=times)
        assert tokens_of(made) == expected
        assert imitated.num_failed >= min(times, 2)
    assert fallbacks.level("graphs") == "host-flags"  # memory may become free: no level is given up for good


def test_memory_that_is_refused_in_the_middle_makes_iterations_smaller(
    imitated: ImitatedDevice, expected: Tokens
) -> None:
    with engine("fastdecode") as made:
        torch.cuda.empty_cache()  # so that torch must ask for memory
        imitated.fail("cudaMalloc", OUT_OF_MEMORY, first=1, times=2)  # torch asks twice
        assert tokens_of(made) == expected
        assert imitated.num_failed == 2


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaStreamBeginCapture", "cudaStreamEndCapture"])
@pytest.mark.parametrize("is_first", [False, True])
def test_after_a_capture_that_fails_cached_blocks_are_freed_for_others(
    imitated: ImitatedDevice, call: str, is_first: bool
) -> None:
    """torch frees its cached blocks before it gives up, but not while it believes that a capture runs.

    Beginning the first of several graphs also takes memory.
    """
    runs = StreamBackend(Streams(torch.device("cuda")), None)
    tensors: list[torch.Tensor] = []
    counter = torch.zeros(1, device="cuda")

    def program(key: str, count: int) -> SmallProgram:
        stage = Stage("work", 0, 0, 1)

        def record(launcher: Launcher) -> None:
            launcher.run(Lane.TO_HOST, stage, lambda: counter.add_(1))
            launcher.run(Lane.DEVICE, stage, lambda: tensors.append(torch.empty(count, device="cuda")))

        return SmallProgram(key, record)

    large = program("large", 64 << 20)
    for each in (large, *[program("small", 1)] * (0 if is_first else 2)):
        runs.start(each, with_flags=False, with_graphs=True)
        runs.wait()
    tensors.clear()
    torch.cuda.empty_cache()
    imitated.fail(call, OUT_OF_MEMORY, times=ALWAYS)
    with pytest.raises(RuntimeError, match="out of memory"):
        runs.start(large, with_flags=False, with_graphs=True)
    assert runs.abandon(RuntimeError()) is None
    assert imitated.num_failed > 0
    imitated.recover()
    total = torch.cuda.mem_get_info()[1]
    for share in (0.6, 0.7):  # the first block is cached when torch asks for the second
        torch.empty(int(share * total), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_stall_of_the_flags_check_is_told(
    imitated: ImitatedDevice, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    imitated.set_timeout(FOREVER_S)
    monkeypatch.setattr("neo_desktop.engine.execute.build.CHECK_TIMEOUT_S", 0.5)
    runs = StreamBackend(Streams(torch.device("cuda")), None)
    flags = torch.zeros(1, 16, dtype=torch.int32).pin_memory()
    if is_lost:
        imitated.hang(1)
    else:
        elsewhere, write = torch.zeros(1, dtype=torch.int32).pin_memory(), stream_lane.stream_write_value
        monkeypatch.setattr(stream_lane, "stream_write_value", lambda stream, flag: write(stream, elsewhere))
    with pytest.raises(DeviceStalledError if is_lost else StreamMemoryError):
        check_flags(runs, flags)


@pytest.mark.parametrize("operation", ["cuStreamWriteValue32", "cuStreamWaitValue32"])
@pytest.mark.parametrize("is_at_start", [True, False])
def test_memory_operations_that_a_capture_refuses_are_done_without(
    imitated: ImitatedDevice, expected: Tokens, operation: str, is_at_start: bool
) -> None:
    def refuse() -> None:
        imitated.fail(f"{operation} in a capture", NOT_SUPPORTED, times=ALWAYS)

    if is_at_start:
        refuse()
    with engine("fastdecode") as made:
        assert fallbacks.level("graphs") == ("device-only" if is_at_start else "host-flags")
        refuse()
        assert tokens_of(made) == expected
        assert fallbacks.level("graphs") == "device-only"
        assert tokens_of(made) == expected
        assert imitated.num_failed == 1  # they are not tried again


def test_a_hand_over_that_the_relay_never_hears_of_is_done_without(
    imitated: ImitatedDevice, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device waits for an answer that never comes, until the relay's guard releases it."""
    set_timeout(monkeypatch, 2.0)
    elsewhere = torch.zeros(1, dtype=torch.int32).pin_memory()
    write = stream_lane.stream_write_value
    with engine("fastdecode") as made:
        monkeypatch.setattr(stream_lane, "stream_write_value", lambda stream, flag: write(stream, elsewhere))
        assert tokens_of(made) == expected
    assert fallbacks.level("graphs") == "device-only"
    assert imitated.num_deadlocks == 0


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
def test_a_slow_device_is_waited_for(imitated: ImitatedDevice, expected: Tokens, policy: str) -> None:
    with engine(policy) as made:
        imitated.delay(1000)
        assert tokens_of(made) == expected
    assert fallbacks.limits() == {}


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
def test_kernels_by_torchs_operators_give_the_tokens_in_graphs_too(
    imitated: ImitatedDevice, expected: Tokens, policy: str
) -> None:
    with kernels_on("torch"), engine(policy) as made:
        assert tokens_of(made) == expected
        assert fallbacks.level("graphs") == "host-flags"


def set_timeout(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the stage timeout of engines made from now on."""
    monkeypatch.setitem(ModelRunner.__init__.__kwdefaults__, "timeout", Timeout(seconds))


def work(made: Engine) -> None:
    """Add all prompts, and step until the engine is idle."""
    for index, prompt in enumerate(PROMPTS):
        made.add(str(index), made.prepare(prompt, PARAMS))
    while made.has_work:
        made.step()


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
@pytest.mark.parametrize("first", [1, 40, 300])
def test_an_illegal_address_ends_the_engine_at_once(
    imitated: ImitatedDevice, monkeypatch: pytest.MonkeyPatch, policy: str, first: int
) -> None:
    """A wait for the timeout, in a step or in `close`, would exceed this test's own deadline."""
    set_timeout(monkeypatch, FOREVER_S)
    with engine(policy) as made:
        imitated.fail("operation", ILLEGAL_ADDRESS, first=first)
        said = "the GPU can no longer be used by this process .*illegal memory access.*start the engine again"
        with pytest.raises(DeviceLostError, match=said):
            work(made)
        with pytest.raises(DeviceLostError, match=said):  # and the error persists
            made.step()
        assert imitated.num_failed == 1


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
@pytest.mark.parametrize("number", [1, 150])
def test_a_device_that_never_ends_is_given_up(
    imitated: ImitatedDevice, monkeypatch: pytest.MonkeyPatch, policy: str, number: int
) -> None:
    imitated.set_timeout(FOREVER_S)  # the imitated device does not detect the hang by itself
    set_timeout(monkeypatch, 5.0)
    with engine(policy) as made:
        imitated.hang(number)
        with pytest.raises(DeviceStalledError, match=r"the GPU did not end .* within .*started again"):
            work(made)
        assert imitated.num_failed == 1
        with pytest.raises(DeviceStalledError):
            made.step()


@pytest.mark.parametrize(("kernel", "mechanism"), [("_add_rms_norm", "norm"), ("_gated", "activation")])
def test_doctor_finds_a_kernel_whose_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, kernel: str, mechanism: str
) -> None:
    rig = Rig(Subject(shape="tiny", device="cuda", dtype="float32"))
    check = next(each for each in kernel_checks(rig) if each.name == f"{mechanism}-triton")
    check.run()
    monkeypatch.setenv("IMITATED_GPU_SPOIL", kernel)
    with pytest.raises(CheckError, match="the relative error is"):
        check.run()
