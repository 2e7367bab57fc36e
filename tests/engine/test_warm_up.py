"""Memory is divided after the largest iterations have run, and promised amounts are kept."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from neo_desktop.engine import setup
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import ZERO
from neo_desktop.engine.profiling.budget import DEVICE_MARGIN_BYTES, FreeMemory, activation_bytes
from neo_desktop.engine.profiling.warm_up import Gauge, warm_up
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape

CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_batch_tokens=96, max_batch_requests=12)
BOTH = MEASURED_TIERS


class FakeGauge:
    """A memory gauge that reads more with each iteration."""

    def __init__(self) -> None:
        self.begun = self.taken = 0

    def begin(self) -> int:
        self.begun += 1
        return 1000

    def most(self) -> int:
        return 1000 + self.taken


@pytest.fixture
def decoder() -> Decoder:
    return random_model(shape("tiny"), dtype=torch.float32, device=CPU)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[IterationPlan]:
    """Return the list of executed iterations."""
    seen: list[IterationPlan] = []
    start = ModelRunner.start

    def noted(self: ModelRunner, plan: IterationPlan) -> Any:
        seen.append(plan)
        return start(self, plan)

    monkeypatch.setattr(ModelRunner, "start", noted)
    return seen


@pytest.mark.parametrize("tiers", [BOTH, (KVTier.DEVICE,), (KVTier.HOST,)], ids=str)
def test_the_largest_iterations_of_each_kind_run(
    decoder: Decoder, plans: list[IterationPlan], tiers: Sequence[KVTier]
) -> None:
    gauge = FakeGauge()
    gauge.taken = 77
    assert warm_up(decoder, tiers, LIMITS, Streams(CPU), gauge) == 77
    assert gauge.begun == 2  # the second call returns the memory
    sequences = [list(plan.sequences) for plan in plans]
    tokens = [sum(len(s.token_ids) for s in each) for each in sequences]
    for tier in tiers:
        prompts = [each for each in sequences if each[0].tier == tier and not each[0].is_decode]
        assert any(len(each) == LIMITS.max_batch_requests for each in prompts)  # with as many samples
        assert any(len(each[0].token_ids) == LIMITS.max_batch_tokens for each in prompts)  # one long prompt
        assert any(each[0].start >= LIMITS.max_batch_tokens for each in prompts)  # after earlier tokens
    assert max(tokens) == LIMITS.max_batch_tokens
    decodes = [each for each in sequences if all(s.is_decode for s in each)]
    assert {len(each) for each in decodes} == {LIMITS.max_batch_requests}
    assert {s.tier for each in decodes for s in each} == set(tiers)
    assert len(decodes) > 1  # also as a graph


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("odd")])
def test_too_little_memory_is_told_with_what_to_do(
    error: RuntimeError, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, "_submit", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gauge = FakeGauge()
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(MemoryError, match=r"iterations of 96 tokens: .*smaller iterations \(max_batch"):
            warm_up(decoder, BOTH, LIMITS, Streams(CPU), gauge)
        assert gauge.begun == 2
    else:
        with pytest.raises(RuntimeError, match="odd"):
            warm_up(decoder, BOTH, LIMITS, Streams(CPU), gauge)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_more_memory_is_taken_than_was_promised() -> None:
    device = torch.device("cuda")
    Gauge(device).begin()
    options = EngineOptions(
        device="cuda",
        shape="tiny",
        policy="neo",
        gpu_cache_tokens=4096,
        cpu_cache_tokens=4096,
        max_batch_tokens=256,
        max_batch_requests=16,
    )
    taken = setup.set_up(options)
    reserved, free = torch.cuda.memory_reserved(), FreeMemory.now(device).gpu_bytes
    assert free is not None
    torch.cuda.reset_peak_memory_stats()
    params = SamplingParams(max_tokens=5, temperature=0.9, top_p=0.9, seed=1, ignore_eos=True)
    least_free = free
    with Engine.from_parts(taken, "neo", cost_model=ZERO) as engine:
        for number in range(6):
            engine.add(str(number), engine.prepare([1 + number] * (20 * number + 3), params))
        while engine.has_work:
            engine.step()
            least_free = min(least_free, FreeMemory.now(device).gpu_bytes or 0)
        promised = (
            activation_bytes(taken.model.config, taken.limits, taken.model.decoder.dtype)
            + DEVICE_MARGIN_BYTES
        )
        assert torch.cuda.max_memory_reserved() - reserved <= promised
        assert free - least_free <= promised
