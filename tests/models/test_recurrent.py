"""Models with recurrent layers give the tokens of transformers, with all policies and after failures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from async_policy import AllAsync
from checkpoints import transformers_greedy
from cost_models import machine
from drafters import Informed
from kv_invariants import check_kv
from recurrent_models import RECURRENT, SEVERAL_ATTENTIONS
from seeds import first
from traced_models import save

from neo_desktop.engine.batch import DeviceMemoryError, IterationPlan
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.setup import take_memory

TOKENS = 14
FAMILIES = sorted(RECURRENT, key="granite-4-h".__ne__)  # a process exports the first one once
COST = machine(cpu_token_ms=1e-6)
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("recurrent")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else save(path, *RECURRENT[family])

    return folder


def prompts() -> list[list[int]]:
    """Return prompts with common prefixes; some end at block boundaries."""
    generator = torch.Generator().manual_seed(1)
    base, *others = (torch.randint(3, 300, (n,), generator=generator).tolist() for n in (64, 1, 5, 16, 30))
    return [others[0], others[1], base[:32] + others[2], base[:33] + others[3], base, base[:48]]


OPTIONS = EngineOptions(
    device="cpu", gpu_cache_tokens=192, cpu_cache_tokens=640, max_batch_tokens=48, max_batch_requests=6
)


def engine_of(folder: Path, policy: str) -> Engine:
    options = replace(OPTIONS, model=folder, gpu_cache_tokens=1024)
    return Engine.from_parts(take_memory(load(options), options), policy, cost_model=COST)


def check(engine: Engine, folder: Path, count: int = TOKENS) -> None:
    expected = [transformers_greedy(folder, prompt, count) for prompt in prompts()]
    params = replace(GREEDY, max_tokens=count)
    assert [list(each.token_ids) for each in engine.generate(prompts(), params)] == expected


@pytest.mark.parametrize("family", first(FAMILIES))
def test_all_policies_give_the_tokens_of_transformers(folder_of: Callable[[str], Path], family: str) -> None:
    folder = folder_of(family)
    options = replace(OPTIONS, model=folder)
    loaded = load(options)
    for policy in sorted(POLICIES):
        with Engine.from_parts(take_memory(loaded, options), policy, cost_model=COST) as engine:
            check(engine, folder)
            before = engine._scheduler.counters.num_cached_tokens
            check(engine, folder)  # prompts come back: from checkpoints
            assert engine._scheduler.counters.num_cached_tokens - before > 100


@pytest.mark.parametrize("family", first(FAMILIES))
@pytest.mark.parametrize("share", first([0.6, 1.0]))
def test_drafts_change_no_token(
    folder_of: Callable[[str], Path], family: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong drafts leave no state behind, also in iterations that fail."""
    folder = folder_of(family)
    answers = {(tuple(each), 0): transformers_greedy(folder, each, TOKENS) for each in prompts()}
    with engine_of(folder, "auto") as engine:
        engine._scheduler._speculation = Speculation(Informed(answers, share), COST, 64)
        check(engine, folder)
        check_kv(engine._kv_cache)
        speculative = engine.stats().speculative
        assert speculative is not None
        assert speculative.num_accepted_tokens > 20
        assert (speculative.num_accepted_tokens < speculative.num_drafted_tokens) == (share < 1)
        executor = engine.executor
        monkeypatch.setattr(executor, "start", Failing(executor.start))
        check(engine, folder)  # prompts come back: from checkpoints
        check_kv(engine._kv_cache)


class Failing:
    """An executor that runs out of memory at the end of some iterations."""

    def __init__(self, start: Callable[[IterationPlan], Wait], every: int = 3) -> None:
        self._start, self._every, self._count, self.failures = start, every, 0, 0

    def __call__(self, plan: IterationPlan) -> Wait:
        self._count += 1
        wait = self._start(plan)
        if self._count % self._every or sum(each.num_tokens for each in plan.sub_batches) == 1:
            return wait

        def fail() -> None:
            wait()
            self.failures += 1
            raise DeviceMemoryError("no room")

        return fail  # type: ignore[return-value]


@pytest.mark.parametrize("family", first(["granite-4-h", "qwen3.5"]))
def test_iterations_that_fail_leave_states_as_they_were(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(family)
    with engine_of(folder, "gpu-only") as engine:
        executor = engine.executor
        failing = Failing(executor.start)
        monkeypatch.setattr(executor, "start", failing)
        check(engine, folder)
        assert failing.failures > 3


@pytest.mark.parametrize("family", first(sorted(SEVERAL_ATTENTIONS, key="lfm2".__ne__)))
def test_async_decodes_give_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between async steps run prompts, moves and iterations that fail; then prefixes come back."""
    folder = save(tmp_path / family, *SEVERAL_ATTENTIONS[family])
    monkeypatch.setitem(POLICIES, "auto", AllAsync("auto", MEASURED_TIERS))
    options = replace(OPTIONS, model=folder, gpu_cache_tokens=96, cpu_cache_tokens=160)
    with Engine.from_parts(take_memory(load(options), options), "auto", cost_model=COST) as engine:
        executor, counters = engine.executor, engine._scheduler.counters
        failing = Failing(executor.start, every=25)
        monkeypatch.setattr(executor, "start", failing)
        for _ in range(2):
            check(engine, folder, 24)
            check_kv(engine._kv_cache)
        assert counters.num_async_decodes > 20
        assert counters.num_moves > 0
        assert counters.num_cached_tokens > 100
        assert failing.failures > 0


def test_several_answers_and_edits_of_one_prompt(folder_of: Callable[[str], Path]) -> None:
    """The answers share the prompt's state, and no answer sees another's tokens."""
    folder = folder_of("granite-4-h")
    prompt = prompts()[4]
    with engine_of(folder, "auto") as engine:
        outputs = engine.generate([prompt], SamplingParams(n=4, max_tokens=20, temperature=1.0, seed=7))
        again = engine.generate([prompt], SamplingParams(n=4, max_tokens=20, temperature=1.0, seed=7))
        assert [each.token_ids for each in outputs] == [each.token_ids for each in again]
        assert len({tuple(each.token_ids) for each in outputs}) == 4
        edited = [*prompt[:40], 5, *prompt[41:]]
        for each in (edited, [*prompt, *outputs[0].token_ids[:10]], prompt):
            (output,) = engine.generate([each], GREEDY)
            assert list(output.token_ids) == transformers_greedy(folder, each, TOKENS)
