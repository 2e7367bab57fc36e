"""A draft model: right drafts from right KV after any events, and unchanged answers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint, save_tokenizer
from cost_models import machine
from engine_fakes import FakeExecutor, make_request, next_token
from hypothesis import given
from hypothesis import strategies as st
from kv_invariants import check_kv
from seeds import few_examples

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import drafting as drafting_module
from neo_desktop.engine.batch import IterationPlan, IterationResult, SampledToken
from neo_desktop.engine.drafting import Drafting
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import GIB, FreeMemory
from neo_desktop.engine.request import Request
from neo_desktop.engine.setup import set_up
from neo_desktop.engine.speculate.draft_model import DraftLimits, DraftModel
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE

COST = machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1e-6)
BLOCK_SIZE, MAX_TOKENS = 4, 24
PROMPTS = [[1, 2, 3], [4] * 50, list(range(90)), [9, 8] * 20]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def draft_model(num_blocks: int = 40, **changes: Any) -> tuple[DraftModel, KVCache]:
    """Return a draft model whose "model" is the fake one: its tokens depend on all KV."""
    kv = KVCache({KVTier.DEVICE: num_blocks}, BLOCK_SIZE)
    limits = DraftLimits(90, own_vocab_size=100, vocab_size=100, max_tokens=MAX_TOKENS, most_requests=4)
    executor = FakeExecutor(BLOCK_SIZE, MAX_TOKENS)
    return DraftModel(executor.execute, kv, executor.close, limits._replace(**changes)), kv


def gain(request: Request, token_ids: list[int]) -> None:
    for token_id in token_ids:
        request.append(SampledToken(token_id))
    request.num_tokens = len(request.token_ids)


def following(request: Request, count: int) -> list[int]:
    """Return the fake model's next tokens."""
    tokens = list(request.token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(request.token_ids) :]


@given(st.data())
def test_every_draft_is_the_models_own_whatever_happened_to_requests_before(data: st.DataObject) -> None:
    model, kv = draft_model(data.draw(st.integers(3, 40)))
    params = SamplingParams(max_tokens=80)
    requests: list[Request] = []
    for step in range(data.draw(st.integers(1, 12))):
        if not requests or data.draw(st.booleans()):
            prompt = data.draw(st.lists(st.integers(0, 22), min_size=1, max_size=60))
            requests.append(make_request(str(step), prompt, params))
        requests = [request for request in requests if not request.is_finished]
        asked = data.draw(st.permutations(requests))[:4]
        width = data.draw(st.integers(1, 8))
        drafts = model.draft_all(asked, width)
        check_kv(kv)
        for request, draft in zip(asked, drafts, strict=True):
            assert len(draft) in (0, width)
            assert list(draft) == following(request, len(draft))
        for request in requests:
            event = data.draw(st.sampled_from(("right", "wrong", "nothing", "preempted", "ended")))
            count = data.draw(st.integers(1, 3))
            if event == "right":
                gain(request, following(request, count))
            elif event == "wrong":
                gain(request, data.draw(st.lists(st.integers(0, 22), min_size=1, max_size=3)))
            elif event == "preempted":
                request.num_preemptions += 1
            elif event == "ended":
                gain(request, [0] * (80 - len(request.token_ids) + request.num_prompt_tokens))


def test_a_long_prompt_is_caught_up_in_parts_and_its_kv_is_given_back() -> None:
    model, kv = draft_model()
    request = make_request("r", [1, 2, 3] * 20, SamplingParams(max_tokens=20))
    drafts = [model.draft_all([request], 4)[0] for _ in range(4)]
    assert [len(draft) for draft in drafts] == [0, 0, 4, 4]
    assert kv.num_used_blocks(KVTier.DEVICE) > 0
    request.num_preemptions += 1
    model.draft_all([], 4)
    assert kv.num_used_blocks(KVTier.DEVICE) == 0


def test_unknown_tokens_long_contexts_and_failures_give_no_draft() -> None:
    model, _ = draft_model(own_vocab_size=50, vocab_size=60)
    asked = [make_request(str(token), [token, 1], SamplingParams()) for token in (49, 50)]
    assert [len(draft) for draft in model.draft_all(asked, 2)] == [2, 0]
    small, _ = draft_model(vocab_size=1)
    assert all(token == 0 for token in small.draft_all(asked, 8)[0])
    assert model.draft_all([make_request("long", [1] * 90, SamplingParams())], 2) == [()]

    def fail(plan: IterationPlan) -> IterationResult:
        raise RuntimeError("no more")

    model._execute = fail
    assert model.draft_all(asked, 2) == [(), ()]
    assert model.draft_all(asked, 2) == [(), ()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model, a small one, one with another vocabulary, and the model's answers."""
    folder = tmp_path_factory.mktemp("models")
    large = save_checkpoint(folder / "large", "llama")
    small = save_checkpoint(folder / "small", "qwen3", seed=1, num_hidden_layers=1)
    other = save_checkpoint(folder / "other", "llama", num_hidden_layers=1)
    save_tokenizer(other, more=["<|more|>"])
    texts = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(texts.replace("<|user|>", "<|human|>"))
    with Engine.from_pretrained(large, device="cpu", policy="gpu-only", speculate="off") as engine:
        answers = engine.generate(PROMPTS, PARAMS)
    return SimpleNamespace(large=large, small=small, other=other, answers=tokens_of(answers))


def tokens_of(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


@few_examples
@given(
    policy=st.sampled_from(("gpu-only", "fastdecode", "neo", "auto")),
    draft=st.sampled_from(("large", "small")),
    cache_tokens=st.sampled_from((256, 2048)),
)
def test_answers_are_the_same_with_a_draft_model(
    models: SimpleNamespace, policy: str, draft: str, cache_tokens: int
) -> None:
    with Engine.from_pretrained(
        models.large,
        draft_model=getattr(models, draft),
        speculate="draft",
        device="cpu",
        policy=policy,
        gpu_cache_tokens=cache_tokens,
        cpu_cache_tokens=cache_tokens,
        cost_model=COST,
    ) as engine:
        speculation: Any = engine._scheduler._speculation
        speculation.model.ms = lambda requests, width: 0.0
        answers = engine.generate(PROMPTS, PARAMS)
        speculative = engine.stats().speculative
        speculation.model.draft_all([], 1)
        assert speculation.model._kv.num_used_blocks(KVTier.DEVICE) == 0
    assert tokens_of(answers) == models.answers
    assert speculative is not None
    assert speculative.num_drafted_tokens > 20
    if draft == "large":
        assert speculative.num_accepted_tokens == speculative.num_drafted_tokens


def test_the_memory_of_a_draft_model_is_counted(models: SimpleNamespace) -> None:
    plain = EngineOptions(model=models.large, device="cpu", policy="fastdecode", cpu_memory_gib=0.02)
    parts = set_up(plain)
    with parts.resources:
        without = parts.num_blocks
    parts = set_up(replace(plain, draft_model=models.small))
    with parts.resources:
        drafter: Any = parts.drafter
        kv = drafter._kv
        small, large = 1, 3  # layers, of the same size
        lost = sum(without.values()) - sum(parts.num_blocks.values())
        taken = kv.size(KVTier.DEVICE).most * small / large
        assert taken <= lost <= taken + 4  # blocks of host memory come in fours


@pytest.mark.parametrize("fits", [True, False])
def test_a_draft_model_leaves_the_gpu_if_weights_would_have_to_leave_it(
    models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A draft model on the GPU leaves 6 GiB of a limit of 8 for the model."""
    caps = {"gpu_memory_gib": 8.0, "cpu_memory_gib": 4.0}
    options = EngineOptions(model=models.large, draft_model=models.small, **caps)
    drafting = Drafting(options, open_checkpoint(models.large))
    free, places, split = FreeMemory(64 * GIB, 20 * GIB), [], WeightPlan({}, 1, 1)
    monkeypatch.setattr(FreeMemory, "now", lambda device: free)

    def load(device: torch.device, vocab_size: int) -> int:
        nonlocal free
        places.append(device.type)
        if device.type == "cuda":
            free = replace(free, gpu_bytes=18 * GIB)
        return GIB

    def plan(
        config: object, form: object, dtype: object, device: object, options: EngineOptions, rates: object
    ) -> object:
        return None if fits and options.gpu_memory_gib == 6.0 else split

    monkeypatch.setattr(drafting, "_load", load)
    monkeypatch.setattr(drafting_module, "plan_memory", plan)
    config = open_checkpoint(models.large).config()
    placed = drafting.plan(config, DENSE, torch.float16, torch.device("cuda"))
    options = drafting.options
    if fits:
        assert (placed, places) == (None, ["cuda"])
        assert (options.gpu_memory_gib, options.cpu_memory_gib) == (6.0, 4.0)
    else:
        assert (placed, places) == (split, ["cuda", "cpu"])
        assert (options.gpu_memory_gib, options.cpu_memory_gib) == (8.0, 3.0)


def test_models_that_cannot_draft_are_refused(models: SimpleNamespace) -> None:
    why = r"vocabularies differ: token 2\d\d is '<.user.>' in one and '<.human.>' in the other"
    with pytest.raises(ModelError, match=why):
        set_up(EngineOptions(model=models.large, draft_model=models.other, device="cpu"))
    for options, message in (
        ({"speculate": "draft"}, "needs a draft_model"),
        ({"speculate": "off", "draft_model": "m"}, "does not go with speculate 'off'"),
        ({"shape": "smollm2-135m", "draft_model": "m"}, "does not go with shape"),
        ({"tensor_parallel": 2, "draft_model": "m"}, "does not go with tensor_parallel"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineOptions(**options)
