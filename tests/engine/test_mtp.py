"""Drafts by a layer of multi-token prediction: right ones, and unchanged answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from cost_models import machine
from engine_fakes import make_request
from hypothesis import given
from hypothesis import strategies as st
from predicting_models import Reference, save_chain, save_predicting

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationTiming, SamplingInput, ScheduledSequence
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.weight_plan import least_gpu_bytes
from neo_desktop.engine.request import NO_TOKENS, Request
from neo_desktop.engine.setup import set_up
from neo_desktop.engine.speculate.kept_states import KeptStates
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.vision.prompt import ImageRows, Sight

COST = machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1e-6)
PARAMS = SamplingParams(max_tokens=56, temperature=0.0, ignore_eos=True)
PROMPTS = [[9] * 40, list(range(3, 43)), [9, 8] * 20, [30, 29, 28, 27] * 10, [5, 6, 7]]


class Drafted(Engine):
    """An engine whose layer drafts as if that took no time."""

    @property
    def head(self) -> Any:
        speculation: Any = self._scheduler._speculation
        return speculation.model

    def answers(self, prompts: Sequence[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
        self.head.ms = lambda requests, width: 0.0
        return tokens_of(self.generate(prompts, PARAMS))


def open_engine(folder: Path, **options: Any) -> Drafted:
    usual = {"device": "cpu", "dtype": "float32", "cost_model": COST, "speculate": "mtp"}
    return Drafted.from_pretrained(folder, **(usual | {"cpu_cache_tokens": 2048} | options))


def tokens_of(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def expected_drafts(reference: Reference, token_ids: Sequence[int], first: int, count: int) -> list[int]:
    """Return the reference's greedy drafts.

    Args:
        first: position of the first token whose hidden state the layer reads.
    """
    hidden = reference.hidden(torch.tensor(token_ids[:-1]))[first:]
    tokens = list(token_ids[first + 1 :])
    for _ in range(count):
        scores, states = reference.predict(torch.tensor(tokens), hidden)
        tokens.append(int(scores[-1].argmax()))
        hidden = torch.cat((hidden, states[-1:]))
    return tokens[len(tokens) - count :]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3", "glm4-moe", "nemotron-h-moe"])
def test_drafts_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    """Prompts are computed in chunks; the answers repeat a prompt whose KV is reused."""
    reference = save_predicting(tmp_path, family)
    seen: list[tuple[list[int], int, list[int]]] = []
    with open_engine(tmp_path, max_batch_tokens=32, max_batch_requests=4) as engine:
        head = engine.head
        draft_all = head.draft_all

        def spy(requests: Sequence[Request], width: int) -> list[Sequence[int]]:
            drafts: list[Sequence[int]] = draft_all(requests, width)
            for request, draft in zip(requests, drafts, strict=True):
                run = head.kept.run_of(request)
                seen.append((list(request.token_ids), run.origin, list(draft)))
            return drafts

        head.draft_all = spy
        engine.answers()
        assert not any(origin for _, origin, _ in seen)
        count = len(seen)
        engine.answers(PROMPTS[1:2])
        assert any(origin > 0 for _, origin, _ in seen[count:])
    drafted = [each for each in seen if each[2]]
    assert len(drafted) > 20
    assert max(len(draft) for _, _, draft in drafted) > 2
    for token_ids, origin, draft in drafted[::5]:
        assert draft == expected_drafts(reference, token_ids, origin, len(draft))


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A hybrid whose layer is nearly always right, and its answers without drafts."""
    folder = tmp_path_factory.mktemp("chain")
    save_chain(folder, "qwen3.5", noise=0.04)
    with Engine.from_pretrained(folder, device="cpu", dtype="float32", speculate="off") as engine:
        return SimpleNamespace(folder=folder, answers=tokens_of(engine.generate(PROMPTS, PARAMS)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("policy", "tokens"), [("gpu-only", 208), ("fastdecode", 2048), ("neo", 208), ("auto", 2048)]
)
def test_answers_are_the_same_with_drafts_by_the_layer(
    chain: SimpleNamespace, policy: str, tokens: int
) -> None:
    sizes = {"gpu_cache_tokens": tokens, "cpu_cache_tokens": tokens}
    with open_engine(chain.folder, policy=policy, **sizes) as engine:
        assert engine.answers() == chain.answers
        stats = engine.stats()
        assert stats.speculative is not None
        assert 0 < stats.speculative.num_accepted_tokens < stats.speculative.num_drafted_tokens
        if policy == "gpu-only":
            assert stats.num_preemptions > 0
        engine.head.draft_all([], 1)
        assert engine.head._kv.num_used_blocks(KVTier.DEVICE) == 0


def test_drafts_go_with_weights_in_host_memory_and_with_images(chain: SimpleNamespace) -> None:
    config = open_checkpoint(chain.folder).config()
    least = least_gpu_bytes(config, DENSE, torch.float32)
    rows, rng = np.arange(3, 7), np.random.default_rng(0)
    embeddings = rng.normal(size=(len(rows), config.hidden_size)).astype(np.float32)
    empty = np.empty(0, np.int64)
    images = ImageRows(rows, embeddings, (), Sight.CAUSAL, (), (), empty, np.empty((0, len(rows)), np.int64))
    with open_engine(chain.folder, gpu_weights_gib=(least + 2**16) / 2**30) as engine:
        assert engine._decoder.has_splits
        assert engine.answers() == chain.answers

        def answer(*, speculation: bool) -> list[int]:
            prepared = engine.prepare(list(range(50, 90)), replace(PARAMS, speculation=speculation))
            engine.add("r", replace(prepared, images=images))
            found: list[int] = []
            while engine.has_work:
                found += [token.token_id for output in engine.step() for token in output.tokens]
            return found

        def num_accepted() -> int:
            stats = engine.stats().speculative
            return 0 if stats is None else stats.num_accepted_tokens

        before = num_accepted()
        assert before > 20
        drafted = answer(speculation=True)
        assert num_accepted() > before + 20
        assert drafted == answer(speculation=False)


def test_a_perfect_layer_is_always_right(tmp_path: Path) -> None:
    save_chain(tmp_path, "qwen3.5")
    with open_engine(tmp_path, speculate="auto") as engine:
        assert engine.answers()[-1][:4] == (8, 9, 10, 11)
        stats = engine.stats().speculative
    assert stats is not None
    assert stats.num_drafted_tokens > 20
    assert stats.num_accepted_tokens == stats.num_drafted_tokens
    parts = set_up(EngineOptions(model=tmp_path, device="cpu", speculate="ngram"))
    with parts.resources:
        assert parts.drafter is None


def test_models_without_a_layer_are_refused(tmp_path: Path) -> None:
    plain = save_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(ModelError, match="has no layer of multi-token prediction"):
        set_up(EngineOptions(model=plain, device="cpu", speculate="mtp"))
    with pytest.raises(ValueError, match="does not go with shape"):
        set_up(EngineOptions(shape="smollm2-135m", device="cpu", speculate="mtp"))


@given(
    st.integers(2, 30),
    st.integers(0, 29),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from((None, 0, 1))), max_size=30),
)
def test_hidden_states_that_are_kept_are_the_newest_ones(
    num_prompt: int, num_reused: int, chunk: int, steps: list[tuple[int, int, int | None]]
) -> None:
    """A hidden state is its position here; a wrong one has a fraction."""
    kept, prompt = KeptStates(2, most_tokens=8), list(range(num_prompt))
    request = make_request("r", prompt, SamplingParams(max_tokens=200))
    for position in range(min(num_reused, num_prompt - 1), num_prompt, chunk):
        end = min(position + chunk, num_prompt)
        count = kept.wanted(request, end, end - position)
        assert count <= 8
        if count:
            kept.keep(request, end - count, np.arange(end - count, end, dtype=np.float32)[:, None])
    request.token_ids.append(0)
    for right, wrong, num_left in steps:
        run = kept.run_of(request)
        assert run is not None
        known = len(request.token_ids) - 1
        assert run.first < known
        assert known - run.first <= 14
        assert len(run._rows) <= 16
        assert run.between(run.first, known)[:, 0].tolist() == list(range(run.first, known))
        if num_left is not None:
            run.drop_before(known - 1 - num_left)
        states = [*range(known, known + right), *(known + right + 0.5 for _ in range(wrong))]
        kept.keep(request, known, np.array(states, np.float32)[:, None])
        request.token_ids.extend(range(right))
    others = [make_request(name, prompt, SamplingParams()) for name in "st"]
    assert kept.wanted(others[0], len(prompt), 1) == 1
    kept.keep(others[0], 0, np.zeros((1, 1), np.float32))
    assert kept.wanted(others[1], len(prompt), 1) == 0
    kept.keep(others[1], 0, np.zeros((1, 1), np.float32))  # prompts of one iteration are asked for together
    assert len(kept._runs) == 2
    kept.stop()
    kept.keep(others[0], 0, np.zeros((1, 1), np.float32))  # of an iteration that ran meanwhile
    assert kept.run_of(others[0]) is None
    assert kept.wanted(others[0], len(prompt), 1) == 0


def test_iterations_return_hidden_states_with_and_without_a_graph() -> None:
    """A row's hidden state is its number here."""

    def sequence(name: str, start: int, count: int) -> ScheduledSequence:
        table = NO_TOKENS  # not read
        sampling = SamplingInput(PARAMS, 0, 0, 0, NO_TOKENS, NO_TOKENS)
        return ScheduledSequence(
            name, (1,) * count, start, KVTier.DEVICE, table, sampling, num_hidden=min(count, 3)
        )

    hidden = torch.arange(8.0)[:, None].expand(-1, 2)
    workspace: Any = SimpleNamespace(
        latest=torch.zeros(8), last_hidden=hidden, tokens=torch.arange(8), keep_tokens=lambda _: None
    )
    decoder = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(vocab_size=8))
    stages: Any = SimpleNamespace(
        decoder=decoder, logits=lambda x, out: out.zero_().scatter_(1, x[:, :1].long(), 1)
    )
    decode, draft, other = sequence("a", 9, 1), sequence("a", 10, 1), sequence("b", 4, 1)
    in_graph = [(decode, 0), (draft, 1), (other, 4)]
    prompt = sequence("c", 0, 5)
    apart = [(decode, 0), (draft, 1), (prompt, 4)]
    for ends, states, chosen, expected in (
        (in_graph, None, 8, {"a": [0, 1], "b": [4]}),
        (apart, hidden[:5], None, {"a": [0, 1], "c": [2, 3, 4]}),
    ):
        outputs = Outputs(ends, stages, workspace, chosen)
        outputs.start(states)
        result = outputs.result(IterationTiming(1.0, 0.0))
        assert {name: each[:, 0].tolist() for name, each in result.hidden.items()} == expected
        assert {name: token.token_id for name, token in result.sampled.items()} == {
            name: rows[0] if name == "a" else rows[-1] for name, rows in expected.items()
        }
