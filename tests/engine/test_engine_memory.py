"""The engine and the memory of its device: too little, refused, freed, and of two kinds."""

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import transformers_greedy
from cost_models import machine
from engine_prompts import GREEDY, prompts
from idle import assert_is_idle
from torch_layer import TorchLayer

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import DeviceMemoryError, IterationPlan, IterationResult
from neo_desktop.engine.errors import ContextLengthError, EngineError
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.kv import streamed
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.schedule.policies import POLICIES


@pytest.mark.parametrize("cpu_cache_dtype", ["auto", "int8"])
def test_kv_moves_between_memories_of_two_kinds_as_with_a_gpu(
    checkpoints: dict[str, Path], cpu_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prompts(8)
    kinds = iter([TorchLayer, HostLayer])
    assert POLICIES["neo"].tiers == (KVTier.DEVICE, KVTier.HOST)
    monkeypatch.setattr(streamed, "KVPool", lambda *args, **named: KVPool(*args, kind=next(kinds), **named))
    with Engine.from_pretrained(
        checkpoints["llama"],
        device="cpu",
        policy="neo",
        gpu_cache_tokens=320,
        cpu_cache_tokens=2000,
        cpu_cache_dtype=cpu_cache_dtype,
        cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
    ) as engine:
        outputs = engine.generate(batch, GREEDY)
        assert [len(output.token_ids) for output in outputs] == [64] * 8
        if cpu_cache_dtype == "auto":
            expected = [transformers_greedy(checkpoints["llama"], prompt, 64) for prompt in batch]
            assert [list(output.token_ids) for output in outputs] == expected
        assert_is_idle(engine)
        stats = engine.stats()
        assert min(stats.num_moves, stats.num_cpu_decodes, stats.num_double_iterations) > 0
    assert next(kinds, None) is None, "the engine did not make its pools here"


def test_a_device_short_of_memory_gets_smaller_iterations_and_no_request_is_lost(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device refuses large iterations now and then, also in the middle of moves between the pools."""
    batch = prompts(8)
    expected = [transformers_greedy(checkpoints["llama"], prompt, 64) for prompt in batch]
    start = ModelRunner.start
    sizes = []

    def fail() -> IterationResult:
        raise DeviceMemoryError("another program took it")

    def short_of_memory(self: ModelRunner, plan: IterationPlan) -> Wait:
        num_tokens = sum(sub_batch.num_tokens for sub_batch in plan.sub_batches)
        sizes.append(num_tokens)
        if num_tokens > 40 or (plan.copies and len(sizes) % 5 == 0):
            if len(sizes) % 2 == 0:
                fail()  # the error shows at submission, or later
            return fail
        return start(self, plan)

    monkeypatch.setattr(ModelRunner, "start", short_of_memory)
    with Engine.from_pretrained(
        checkpoints["llama"],
        device="cpu",
        policy="neo",
        gpu_cache_tokens=320,
        cpu_cache_tokens=2000,
        cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
    ) as engine:
        outputs = engine.generate(batch, GREEDY)
        assert [list(output.token_ids) for output in outputs] == expected
        assert_is_idle(engine)
    assert max(sizes) > 40, "the test did not reach what it is about"


def test_a_device_that_stays_short_of_memory_is_told_once_and_seldom_asked_for_more(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = ModelRunner.start
    sizes = []

    def short_of_memory(self: ModelRunner, plan: IterationPlan) -> Wait:
        sizes.append(sum(sub_batch.num_tokens for sub_batch in plan.sub_batches))
        if sizes[-1] > 20:
            raise DeviceMemoryError("another program took it")
        return start(self, plan)

    lasting = replace(GREEDY, max_tokens=128)
    with Engine.from_pretrained(checkpoints["llama"], device="cpu") as engine:
        monkeypatch.setattr(ModelRunner, "start", short_of_memory)
        outputs = engine.generate([[index] for index in range(3, 35)], lasting)
        assert {len(output.token_ids) for output in outputs} == {128}
        assert_is_idle(engine)
    refused = sum(size > 20 for size in sizes)
    assert 2 <= refused < 0.1 * len(sizes)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the device is short of memory: continuing with smaller iterations (another program took it)"
    ]


def test_a_device_without_any_memory_ends_its_requests_with_a_reason(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: ModelRunner, plan: IterationPlan) -> Wait:
        raise DeviceMemoryError("another program took it all")

    with Engine.from_pretrained(checkpoints["llama"], device="cpu") as engine:
        monkeypatch.setattr(ModelRunner, "start", no_memory)
        with pytest.raises(EngineError, match="no memory left: another program took it all"):
            engine.generate(prompts(3), GREEDY)
        assert_is_idle(engine)


def test_a_context_longer_than_the_caches_is_refused_not_waited_for(checkpoints: dict[str, Path]) -> None:
    with Engine.from_pretrained(
        checkpoints["llama"], device="cpu", policy="gpu-only", gpu_cache_tokens=64
    ) as engine:
        assert engine.max_context_tokens == 64
        with pytest.raises(ContextLengthError):
            engine.generate([[1] * 64])


def test_caches_that_cannot_be_had_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(MemoryError, match="ask for at most"):
        Engine.from_pretrained(checkpoints["llama"], device="cpu", gpu_cache_tokens=10**10)
    with pytest.raises(MemoryError, match="no room for KV"):
        Engine.from_pretrained(checkpoints["llama"], device="cpu", policy="gpu-only", gpu_cache_tokens=0)


def test_a_closed_engine_holds_neither_weights_nor_kv(checkpoints: dict[str, Path]) -> None:
    """Otherwise the next engine of the process finds no memory."""
    others = {id(each) for each in large_tensors()}
    engine = Engine.from_pretrained(
        checkpoints["llama"], device="cpu", policy="neo", gpu_cache_tokens=320, cpu_cache_tokens=320
    )
    engine.generate(prompts(2), SamplingParams(max_tokens=2, temperature=0.0))
    tensors = [weakref.ref(each) for each in large_tensors() if id(each) not in others]
    assert len(tensors) > 10
    engine.close()
    gc.collect()
    assert [each for each in tensors if each() is not None] == []


def large_tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) is torch.Tensor and each.nbytes > 10_000]
