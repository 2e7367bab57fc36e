"""Prompts as vectors: the model's last hidden states, pooled, on every path through the engine."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE
from cost_models import machine
from idle import assert_is_idle
from transformers import AutoModelForCausalLM

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import DeviceMemoryError, IterationPlan
from neo_desktop.engine.errors import ContextLengthError, EngineError
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.sampling_params import Pooling
from neo_desktop.engine.schedule.policies import POLICIES

GREEDY = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = (1, 16, 150, 33, 2, 90)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def expected(folder: Path, pooling: Pooling) -> np.ndarray:
    """Return the embeddings of transformers, [prompts, hidden], each of length 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for prompt in prompts():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
        pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
        rows.append(pooled / pooled.norm())
    return torch.stack(rows).numpy()


@pytest.mark.sample(4)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(
    checkpoints: dict[str, Path], family: str, pooling: Pooling
) -> None:
    """Long prompts are computed in chunks."""
    folder = checkpoints[family]
    with Engine.from_pretrained(folder, device="cpu", max_batch_tokens=64, max_batch_requests=4) as engine:
        found = engine.embed(prompts(), pooling)
        assert_is_idle(engine)
    for one, wanted in zip(found, expected(folder, pooling), strict=True):
        assert one.dtype == np.float32
        assert np.linalg.norm(one) == pytest.approx(1.0, abs=1e-6)
        np.testing.assert_allclose(one, wanted, atol=2e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_beside_outputs_with_little_memory_nothing_changes(
    checkpoints: dict[str, Path], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are preempted, moved and chunked; the engine plans the next iteration meanwhile."""
    folder = checkpoints["llama"]
    mean, last = SamplingParams(pooling="mean"), SamplingParams(pooling="last")
    with Engine.from_pretrained(folder, device="cpu") as roomy:
        tokens = [output.token_ids for output in roomy.generate(prompts(), GREEDY)]
    with (
        Engine.from_pretrained(
            folder,
            device="cpu",
            policy=policy,
            gpu_cache_tokens=272,
            cpu_cache_tokens=272,
            max_batch_tokens=40,
            max_batch_requests=8,
            cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
        ) as engine,
        ThreadPoolExecutor(1) as device,
    ):
        start = engine.executor.start
        monkeypatch.setattr(engine.executor, "start", lambda plan: device.submit(start(plan)).result)
        each = [params for _ in prompts() for params in (GREEDY, mean, last)]
        outputs = engine.run([prompt for prompt in prompts() for _ in range(3)], each)
        stats = engine.stats()
        assert stats.num_preemptions + stats.num_moves > 0, "the test did not reach what it is about"
        assert_is_idle(engine)
    assert [tuple(t.token_id for o in one for t in o.tokens) for one in outputs[::3]] == tokens
    for part, pooling in ((outputs[1::3], POOLINGS[0]), (outputs[2::3], POOLINGS[1])):
        for one, wanted in zip(part, expected(folder, pooling), strict=True):
            assert (len(one), one[0].text, one[0].tokens, one[0].num_output_tokens) == (1, "", (), 0)
            assert one[0].embedding is not None
            np.testing.assert_allclose(one[0].embedding, wanted, atol=2e-5)


def test_kept_kv_is_neither_used_nor_left_behind(llama: Engine) -> None:
    """A token whose KV is already cached would have no hidden state."""
    prompt = prompts()[2]
    llama.generate([prompt], GREEDY)
    first, again = llama.embed([prompt, prompt])
    np.testing.assert_allclose(first, again, atol=1e-6)
    assert llama.generate([prompt], GREEDY)[0].num_cached_tokens == 144
    other = [*prompt[1:], 5]
    llama.embed([other])
    assert llama.generate([other], GREEDY)[0].num_cached_tokens == 0


def test_a_device_short_of_memory_gives_the_same(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, sizes = ModelRunner.start, []

    def short_of_memory(self: ModelRunner, plan: IterationPlan) -> Wait:
        sizes.append(sum(sub_batch.num_tokens for sub_batch in plan.sub_batches))
        if sizes[-1] > 40:
            raise DeviceMemoryError("another program took it")
        return start(self, plan)

    monkeypatch.setattr(ModelRunner, "start", short_of_memory)
    with Engine.from_pretrained(checkpoints["llama"], device="cpu") as engine:
        found = engine.embed(prompts(), "mean")
        assert_is_idle(engine)
    assert max(sizes) > 40, "the test did not reach what it is about"
    np.testing.assert_allclose(found, expected(checkpoints["llama"], "mean"), atol=2e-5)


def test_what_is_not_finite_or_too_long_is_told(llama: Engine) -> None:
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        llama.embed([[1] * 600])
    norm = llama._decoder.final_norm.clone()
    llama._decoder.final_norm[3] = torch.nan
    try:
        with pytest.raises(EngineError, match="not finite"):
            llama.embed([[1, 2, 3]])
    finally:
        llama._decoder.final_norm.copy_(norm)
    assert_is_idle(llama)


@pytest.mark.parametrize(
    "changes", [{"pooling": "max"}, {"n": 2}, {"logprobs": 1}, {"grammar": "start: /x/"}]
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^pooling "):
        replace(SamplingParams(pooling="mean"), **changes)  # type: ignore[arg-type]
