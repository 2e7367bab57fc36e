"""The whole engine against transformers, on small random checkpoints of every family."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from async_policy import AllAsync
from checkpoints import FAMILIES, VOCAB_SIZE, transformers_greedy
from cost_models import machine
from engine_prompts import GREEDY, prompts
from idle import assert_is_idle
from seeds import seeds

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.request import FinishReason
from neo_desktop.engine.schedule.policies import POLICIES


def test_a_start_tells_how_long_loading_and_the_first_token_took(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Engine.from_pretrained(
        checkpoints["llama"], device="cpu", policy="gpu-only", gpu_cache_tokens=512
    ) as engine:
        engine.generate(prompts(3), SamplingParams(max_tokens=3))
        engine.generate(prompts(1), SamplingParams(max_tokens=3))
    said = [message for message in caplog.messages if message.startswith(f"{engine.model_name}: ")]
    assert len(said) == 2
    assert "loaded in" in said[0]
    assert "GB/s" in said[0]
    assert "the first token came" in said[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_are_those_of_transformers_alone_and_batched(
    checkpoints: dict[str, Path], family: str
) -> None:
    batch = prompts(6)
    with Engine.from_pretrained(
        checkpoints[family], device="cpu", max_batch_tokens=100, max_batch_requests=6
    ) as engine:
        batched = engine.generate(batch, GREEDY)
        alone = [engine.generate([prompt], GREEDY)[0] for prompt in batch[-2:]]
    expected = [transformers_greedy(checkpoints[family], prompt, 64) for prompt in batch]
    assert [list(each.token_ids) for each in batched] == expected
    assert [list(each.token_ids) for each in alone] == expected[-2:]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("policy", "gpu_cache_tokens", "cpu_cache_tokens", "happens"),
    [
        ("gpu-only", 320, None, ["num_preemptions"]),
        ("auto", 320, 2000, ["num_moves", "num_cpu_decodes"]),
        ("auto", 320, 64, ["num_preemptions"]),
        ("auto", 0, 400, ["num_preemptions"]),
        ("auto", 64, 320, ["num_preemptions"]),
        ("neo", 320, 2000, ["num_moves", "num_double_iterations"]),
        ("neo", 320, 64, ["num_preemptions"]),
        ("fastdecode", None, 400, ["num_preemptions"]),
        ("fastdecode", None, 2000, ["num_double_iterations"]),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gpt-oss"])
def test_every_policy_and_memory_gives_the_same_tokens(
    checkpoints: dict[str, Path],
    family: str,
    policy: str,
    gpu_cache_tokens: int | None,
    cpu_cache_tokens: int | None,
    happens: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests wait, move between the pools, are preempted and recomputed, without a change of tokens.

    Iterations run beside the engine, as on a GPU, while the engine plans the next ones. Predictions are
    for an imaginary machine, so the test does the same on any machine.
    """
    batch = prompts(8)
    expected = [transformers_greedy(checkpoints[family], prompt, 64) for prompt in batch]
    with (
        Engine.from_pretrained(
            checkpoints[family],
            device="cpu",
            policy=policy,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=cpu_cache_tokens,
            cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
        ) as engine,
        ThreadPoolExecutor(1) as device,
    ):
        start = engine.executor.start
        monkeypatch.setattr(engine.executor, "start", lambda plan: device.submit(start(plan)).result)
        outputs = engine.generate(batch, GREEDY)
        assert [list(output.token_ids) for output in outputs] == expected
        assert_is_idle(engine)
        for event in happens:
            assert getattr(engine.stats(), event) > 0, "the test did not reach what it is about"


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_predictions_measured_here_change_nothing_but_the_speed(
    checkpoints: dict[str, Path], policy: str
) -> None:
    batch = prompts(8)
    expected = [transformers_greedy(checkpoints["llama"], prompt, 64) for prompt in batch]
    with Engine.from_pretrained(
        checkpoints["llama"], device="cpu", policy=policy, gpu_cache_tokens=320, cpu_cache_tokens=3200
    ) as engine:
        outputs = engine.generate(batch, GREEDY)
        assert [list(output.token_ids) for output in outputs] == expected
        assert_is_idle(engine)


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_decodes_at_their_own_pace_give_the_same_tokens(
    checkpoints: dict[str, Path], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, moves and preemptions happen between the async steps."""
    rng = random.Random(seed)
    batch = prompts(8)
    lengths = [rng.randint(10, 64) for _ in batch]
    expected = [transformers_greedy(checkpoints["llama"], prompt, 64) for prompt in batch]
    monkeypatch.setitem(POLICIES, "auto", AllAsync("auto", MEASURED_TIERS))
    with Engine.from_pretrained(
        checkpoints["llama"],
        device="cpu",
        gpu_cache_tokens=rng.randint(200, 400),
        cpu_cache_tokens=rng.randint(300, 2000),
        max_batch_tokens=rng.randint(24, 200),
        max_batch_requests=8,
        cost_model=machine(),
    ) as engine:
        params = [replace(GREEDY, max_tokens=length) for length in lengths]
        outputs = engine.generate(batch, params)
        assert [list(output.token_ids) for output in outputs] == [
            tokens[:length] for tokens, length in zip(expected, lengths, strict=True)
        ]
        assert_is_idle(engine)
        assert engine._scheduler.counters.num_async_decodes > 0


def test_a_repeated_beginning_is_not_computed_again_and_changes_nothing(llama: Engine) -> None:
    prompt = prompts(6)[5]
    first = llama.generate([prompt], GREEDY)[0]
    again = llama.generate([prompt, [*prompt[:100], 5, 6]], GREEDY)
    assert again[0].token_ids == first.token_ids
    assert [output.num_cached_tokens for output in again] == [144, 96]
    assert_is_idle(llama)


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(llama: Engine) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=1.5, top_p=0.95, seed=7)
    prompt = prompts(3)[2]
    alone = llama.generate([prompt], seeded)[0]
    others = SamplingParams(max_tokens=30, temperature=0.8)
    batch = llama.generate([*prompts(3), prompt], [others, others, others, seeded])
    assert batch[3].token_ids == alone.token_ids


def test_n_outputs_differ_and_come_in_order(llama: Engine) -> None:
    outputs = llama.generate(prompts(2), SamplingParams(n=3, max_tokens=8, temperature=2.0, seed=1))
    assert len(outputs) == 6
    assert [output.num_prompt_tokens for output in outputs] == [1, 1, 1, 16, 16, 16]
    assert len({output.token_ids for output in outputs[:3]}) == 3


def test_requests_join_and_leave_between_any_two_steps(llama: Engine) -> None:
    first, second = prompts(5)[3:5]
    expected = {"a": llama.generate([first], GREEDY)[0], "b": llama.generate([second], GREEDY)[0]}
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    llama.add("a", llama.prepare(first, GREEDY))
    for step in range(200):
        if step == 5:
            llama.add("b", llama.prepare(second, GREEDY))
            llama.add("c", llama.prepare(second, GREEDY))
        if step == 10:
            (last,) = llama.abort("c")
            assert last.finish_reason is FinishReason.ABORT
            assert llama.abort("c") == []
        for output in llama.step():
            seen[output.request_id] += [token.token_id for token in output.tokens]
    for name, completion in expected.items():
        assert seen[name] == list(completion.token_ids)
    assert seen["c"] == seen["b"][: len(seen["c"])]
    assert_is_idle(llama)


def test_the_next_iteration_is_under_way_when_outputs_are_made(llama: Engine) -> None:
    """Requests that arrive before its planning are part of the next iteration."""
    first, second = prompts(5)[3:5]
    expected = [completion.token_ids for completion in llama.generate([first, second], GREEDY)]
    start, plans = llama.executor.start, []

    def started(plan: IterationPlan) -> Wait:
        plans.append([sequence.request_id for sequence in plan.sequences])
        return start(plan)

    seen: dict[str, list[int]] = {"a": [], "b": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.executor, "start", started)
        llama.add("a", llama.prepare(first, GREEDY))
        while llama.has_work:
            llama.collect()
            if len(plans) == 3:
                llama.add("b", llama.prepare(second, GREEDY))
            llama.launch()
            for output in llama.take_outputs():
                seen[output.request_id] += [token.token_id for token in output.tokens]
            if len(seen["a"]) < 64:
                assert len(plans) == 1 + len(seen["a"])
    assert plans[2] == ["a#0"]
    assert sorted(plans[3]) == ["a#0", "b#0"]
    assert [tuple(tokens) for tokens in seen.values()] == expected
    assert_is_idle(llama)


def test_text_prompts_stop_strings_and_text_agree_with_the_tokenizer(llama: Engine) -> None:
    free = llama.generate(["Hello"], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))[0]
    assert free.text == llama.tokenizer.decode(list(free.token_ids))
    stop = free.text[10:12]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=stop)
    stopped = llama.generate(["Hello"], params)[0]
    assert stopped.text == free.text[: free.text.find(stop)]
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], GREEDY, ValueError, "empty"),
        ([VOCAB_SIZE], GREEDY, ValueError, f"token id {VOCAB_SIZE}"),
        ([-1], GREEDY, ValueError, "token id -1"),
        ([1] * 512, GREEDY, ContextLengthError, "512 tokens"),
        ([1] * 500, GREEDY, ContextLengthError, "max_tokens"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_and_leaves_nothing_behind(
    llama: Engine, prompt: list[int], params: SamplingParams, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llama.generate([[1, 2, 3], prompt], params)
    assert_is_idle(llama)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"policy": "magic"}, "policy 'magic'"),
        ({"cpu_cache_dtype": "int4"}, "cpu_cache_dtype 'int4'"),
        ({"cpu_cache_dtype": "int8", "policy": "gpu-only"}, "but this policy has no CPU-cache"),
        ({"gpu_cache_tokens": -1}, "gpu_cache_tokens"),
        ({"max_batch_requests": 0}, "max_batch_requests"),
        ({"shape": "llama-9"}, "llama-9"),
    ],
)
def test_wrong_arguments_are_named(
    checkpoints: dict[str, Path], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(checkpoints["llama"], **({"device": "cpu"} | arguments))  # type: ignore[arg-type]
