"""Drafts by Gemma 4's assistant: those of transformers, and unchanged answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_models import Pair, save_pair
from cost_models import machine

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.mtp import Layer, may_draft, own_bytes, plan_beside
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.setup import set_up
from neo_desktop.engine.speculate.assistant_head import AssistantHead
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import assistant_folder

CPU = torch.device("cpu")
COST = machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1e-6)
PARAMS = SamplingParams(max_tokens=56, temperature=0.0, ignore_eos=True)
PROMPTS = [[9] * 40, list(range(3, 43)), [9, 8] * 20, [30, 29, 28, 27] * 10, [5, 6, 7]]


def head_of(engine: Engine) -> AssistantHead:
    """Return the engine's assistant, which is asked as if that took no time."""
    speculation = engine._scheduler._speculation
    assert speculation is not None
    head = speculation.model
    assert isinstance(head, AssistantHead)
    head.ms = lambda requests, width: 0.0  # type: ignore[method-assign]
    return head


def drafts_of(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Let the assistant draft before each iteration; return a list that gets tokens and their drafts."""
    seen: list[tuple[list[int], list[int]]] = []
    head, scheduler = head_of(engine), engine._scheduler
    speculation = scheduler._speculation
    assert speculation is not None
    widened = speculation.widened

    def spy(decision: Decision[Request], *given: Any) -> Decision[Request]:
        able = [request for request in scheduler.queues if head.is_able(request)]
        for request, draft in zip(able, head.draft_all(able, 3), strict=True):
            seen.append((list(request.token_ids), list(draft)))
        return widened(decision, *given)

    speculation.widened = spy  # type: ignore[method-assign]
    return seen


def answers(engine: Engine) -> list[tuple[int, ...]]:
    found: list[Completion] = engine.generate(PROMPTS, PARAMS)
    return [answer.token_ids for answer in found]


@pytest.mark.parametrize(
    ("family", "has_clusters", "policy", "tokens"),
    [
        ("gemma4-e", True, "auto", 240),
        ("gemma4-e", False, "gpu-only", 208),
        pytest.param("gemma4", False, "gpu-only", 208, marks=pytest.mark.sample(0)),
        pytest.param("gemma4-odd", False, "fastdecode", 2048, marks=pytest.mark.sample(0)),
    ],
)
def test_drafts_are_those_of_transformers_and_answers_the_same(
    family: str, has_clusters: bool, policy: str, tokens: int, tmp_path: Path
) -> None:
    """Requests are preempted, or move between caches: their KV is read where it is."""
    pair = save_pair(tmp_path, family, has_clusters=has_clusters)
    options = {"device": "cpu", "dtype": "float32", "cost_model": COST, "policy": policy}
    options |= {"gpu_cache_tokens": tokens, "cpu_cache_tokens": tokens, "max_batch_tokens": 32}
    with Engine.from_pretrained(pair.path, speculate="off", **options) as engine:
        expected = answers(engine)
    with Engine.from_pretrained(pair.path, draft_model=pair.draft_path, **options) as engine:
        seen = drafts_of(engine)
        assert answers(engine) == expected
        stats = engine.stats()
        assert stats.speculative is not None
        assert stats.speculative.num_drafted_tokens > 0
        assert policy != "gpu-only" or stats.num_preemptions > 0
    assert len(seen) > 40
    for token_ids, draft in seen[::5]:
        assert draft == pair.drafts(token_ids, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_other_pairs_are_refused(pair: Pair, tmp_path: Path) -> None:
    def refused(path: Path, draft_path: Path, words: str) -> None:
        with pytest.raises(ModelError, match=words):
            set_up(EngineOptions(model=path, draft_model=draft_path, device="cpu"))

    wide = save_pair(tmp_path / "wide", backbone_hidden_size=96).draft_path
    refused(pair.path, wide, "with hidden states of 96 numbers, and this one has 64")
    large = save_pair(tmp_path / "large", text_vocab_size=330).draft_path
    refused(pair.path, large, "with a vocabulary of 330 tokens, and this one has 300")
    narrow = save_pair(tmp_path / "narrow", text_head_dim=8).draft_path
    refused(pair.path, narrow, "with 4 KV heads of 8 numbers in layers of sliding_attention")
    with pytest.raises(ModelError, match="an assistant, which only drafts for a Gemma 4 model"):
        open_checkpoint(pair.draft_path).config()


def test_its_memory_is_part_of_the_plan(pair: Pair) -> None:
    folder = assistant_folder(pair.draft_path)
    assert folder is not None
    assert assistant_folder(pair.path) is None
    layer = Layer.of_assistant(folder, open_checkpoint(pair.path).config())
    own = sum(parameter.nbytes for parameter in pair.assistant.parameters())
    assert own_bytes(layer.config, torch.float32, layer.stored) == pytest.approx(own, rel=0.01)

    def plan(_: EngineOptions, left: FreeMemory) -> WeightPlan | None:
        return None if left == free else WeightPlan({}, 0, 100)

    options, free = EngineOptions(draft_model=pair.draft_path), FreeMemory(4 * GIB, 2 * GIB)
    assert may_draft(layer, options)
    assert not may_draft(layer, EngineOptions())
    with pytest.raises(MemoryError, match="more of the model's weights would be in host memory"):
        plan_beside(layer, torch.float32, torch.device("cuda"), options, free, plan)
    beside = plan_beside(layer, torch.float32, CPU, options, FreeMemory(4 * GIB, None), lambda *_: None)
    assert beside.nbytes == own_bytes(layer.config, torch.float32, layer.stored)
    assert beside.num_blocks == 0
