"""An engine on a GPU on which something fails: the right tokens in the end, or a word to every request."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from imitated_device import (
    ALWAYS,
    ILLEGAL_ADDRESS,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    ImitatedDevice,
    needs_imitated_gpu,
)
from pipeline_case import tiny_model

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.doctor.outcome import CheckError
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.execute.graphs import streams
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.placement import Place, get_policy
from neo_desktop.engine.profiling.budget import MemoryCaps
from neo_desktop.engine.setup import take_memory
from neo_desktop.engine.trial.kernel_checks import kernel_checks
from neo_desktop.engine.trial.rig import Rig
from neo_desktop.models.tokenizer import ByteTokenizer

EXECUTOR = "neo_desktop.engine.execute.graphs.executor"
PROMPTS = [[(7 * i + 3 * j) % 257 for j in range(size)] for i, size in enumerate((5, 19, 12))]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
Tokens = list[tuple[int, ...]]


@contextmanager
def engine(policy: str, device: str = "cuda") -> Iterator[Engine]:
    """A tiny model's engine: `gpu-only` keeps all KV on the device, `fastdecode` all of it in host memory."""
    decoder = tiny_model((None, 5), device=device)
    decoder.config = replace(decoder.config, max_context_tokens=256)  # fewer kernels to warm up
    loaded = LoadedModel("tiny", decoder.config, decoder, ByteTokenizer(), WholeDevice(decoder.device))
    setup = take_memory(
        loaded,
        places=get_policy(policy).places,
        cache_tokens=dict.fromkeys(Place, 256),
        caps=MemoryCaps(),
        max_batch_tokens=64,
        max_batch_requests=4,
    )
    made = Engine.from_setup(setup, policy)
    try:
        yield made
    finally:
        made.close()


def tokens_of(engine: Engine) -> Tokens:
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected() -> Tokens:
    """What the CPU answers."""
    with engine("gpu-only", device="cpu") as on_cpu:
        return tokens_of(on_cpu)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs come back soon, so that tests see it."""
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
    assert ladder.rung("graphs") == "host-flags"  # memory may come back: nothing is given up for good


@pytest.mark.parametrize("first", [1, 2, 3])
def test_memory_that_is_refused_in_the_middle_makes_iterations_smaller(
    imitated: ImitatedDevice, expected: Tokens, first: int
) -> None:
    with engine("fastdecode") as made:
        torch.cuda.empty_cache()  # so that there is something to ask for
        imitated.fail("cudaMalloc", OUT_OF_MEMORY, first=first, times=2)  # torch asks twice
        assert tokens_of(made) == expected
        assert imitated.num_failed == 2


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
        assert ladder.rung("graphs") == ("device-only" if is_at_start else "host-flags")
        refuse()
        assert tokens_of(made) == expected
        assert ladder.rung("graphs") == "device-only"
        assert tokens_of(made) == expected
        assert imitated.num_failed == 1  # they are not tried again


def test_a_hand_over_that_the_relay_never_hears_of_is_done_without(
    imitated: ImitatedDevice, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device waits for an answer that the relay does not give, until the relay's guard releases it."""
    monkeypatch.setattr(f"{EXECUTOR}.PATIENCE_S", 2.0)
    elsewhere = torch.zeros(1, dtype=torch.int32).pin_memory()
    write = streams._write_flag
    with engine("fastdecode") as made:
        monkeypatch.setattr(streams, "_write_flag", lambda stream, flag: write(stream, elsewhere))
        assert tokens_of(made) == expected
    assert ladder.rung("graphs") == "device-only"
    assert imitated.num_deadlocks == 0


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
def test_a_slow_device_is_waited_for(imitated: ImitatedDevice, expected: Tokens, policy: str) -> None:
    with engine(policy) as made:
        imitated.delay(1000)
        assert tokens_of(made) == expected
    assert ladder.limits() == {}


def all_are_told(made: Engine) -> Sequence[str]:
    """Run all prompts; return what each request ended with."""
    for index, prompt in enumerate(PROMPTS):
        made.add_request(str(index), prompt, PARAMS)
    errors = dict[str, str]()
    while made.has_work:
        errors |= {output.request_id: output.error for output in made.step() if output.error is not None}
    assert errors.keys() == {"0", "1", "2"}
    return list(errors.values())


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
@pytest.mark.parametrize("first", [1, 40, 150, 300])
def test_after_an_illegal_address_every_request_is_told(
    imitated: ImitatedDevice, policy: str, first: int
) -> None:
    with engine(policy) as made:
        imitated.fail("operation", ILLEGAL_ADDRESS, first=first)
        for error in all_are_told(made):
            assert "illegal memory access" in error or "can no longer be used" in error
        assert imitated.num_failed == 1


@pytest.mark.parametrize(("kernel", "mechanism"), [("_add_rms_norm", "norm"), ("_silu_mul", "activation")])
def test_doctor_finds_a_kernel_whose_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, kernel: str, mechanism: str
) -> None:
    rig = Rig(Subject(shape="tiny", device="cuda", dtype="float32"))
    check = next(each for each in kernel_checks(rig) if each.name == f"{mechanism}-triton")
    check.run()
    monkeypatch.setenv("IMITATED_GPU_SPOIL", kernel)
    with pytest.raises(CheckError, match="the relative error is"):
        check.run()
