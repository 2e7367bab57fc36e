"""The whole engine with attention workers: the tokens of the model alone, even after worker failures."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import transformers_greedy
from cost_models import machine
from engine_prompts import prompts
from fallback_levels import kernels_on
from idle import assert_is_idle
from workers import running_worker

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote import session
from neo_desktop.engine.remote.session import GpuLayer
from neo_desktop.engine.remote.trust import RefusedError

GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "num_workers", "policy", "gpu_cache_tokens", "cpu_cache_tokens"),
    [
        ("llama", 2, "gpu-only", 320, None),
        ("llama", 2, "neo", 320, 96),
        ("gpt-oss", 1, "neo", 320, 0),
        ("llama", 1, "apex", 320, 320),
        ("llama", 2, "auto", 320, 96),
        ("qwen3-moe", 2, "auto", 320, 0),
        ("llama", 2, "fastdecode", None, 0),
    ],
)
def test_every_policy_gives_the_tokens_of_the_model_alone(
    stack: ExitStack,
    checkpoints: dict[str, Path],
    secret: Path,
    family: str,
    num_workers: int,
    policy: str,
    gpu_cache_tokens: int | None,
    cpu_cache_tokens: int | None,
) -> None:
    """Requests live on workers, move there and back, are preempted and recomputed."""
    batch = prompts(8)
    expected = [transformers_greedy(checkpoints[family], prompt, 48) for prompt in batch]
    addresses = [stack.enter_context(running_worker())[1] for _ in range(num_workers)]
    engine = stack.enter_context(
        Engine.from_pretrained(
            checkpoints[family],
            device="cpu",
            policy=policy,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=cpu_cache_tokens,
            workers=",".join(map(str, addresses)),
            worker_secret=secret,
            cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
        )
    )
    seen: set[KVTier] = set()
    start = engine.executor.start

    def watched(plan):  # type: ignore[no-untyped-def]
        seen.update(sequence.tier for sequence in plan.sequences)
        return start(plan)

    engine.executor.start = watched  # type: ignore[method-assign]
    outputs = engine.generate(batch, GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert_is_idle(engine)
    if policy != "auto":  # which uses workers if they look faster at that moment
        assert {tier for tier in seen if tier.is_remote} == {KVTier.worker(n + 1) for n in range(num_workers)}


@pytest.mark.parametrize(
    ("family", "policy"),
    [("gpt-oss", "fastdecode"), pytest.param("llama", "neo", marks=pytest.mark.sample(0))],
)
def test_a_worker_that_attends_as_a_gpu_does_gives_the_same_tokens(
    stack: ExitStack,
    checkpoints: dict[str, Path],
    secret: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    policy: str,
) -> None:
    """It stores KV in CPU memory, and torch's operators replace the kernels."""
    batch = prompts(8)
    expected = [transformers_greedy(checkpoints[family], prompt, 48) for prompt in batch]
    monkeypatch.setattr(session, "HostLayer", GpuLayer)
    stack.enter_context(kernels_on("torch"))
    _, address = stack.enter_context(running_worker())
    engine = stack.enter_context(
        Engine.from_pretrained(
            checkpoints[family],
            device="cpu",
            policy=policy,
            gpu_cache_tokens=320,
            cpu_cache_tokens=0,
            workers=str(address),
            worker_secret=secret,
            cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
        )
    )
    outputs = engine.generate(batch, GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert engine.stats().num_cpu_decodes > 0
    assert_is_idle(engine)


def test_a_worker_that_refuses_ends_the_start_in_words(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another secret that is long enough")
    with (
        running_worker() as (_, address),
        pytest.raises(RefusedError, match=r"worker-1 at .* the worker has another secret"),
    ):
        Engine.from_pretrained(checkpoints["llama"], device="cpu", workers=str(address), worker_secret=other)


def test_without_a_secret_nothing_is_loaded(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need a secret, but .* does not exist: give both sides the same"):
        Engine.from_pretrained(
            checkpoints["llama"], device="cpu", workers="box", worker_secret=tmp_path / "none"
        )
