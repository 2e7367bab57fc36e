"""A thought that has used up its tokens ends, and the answer follows its form."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import grammar as grammars
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.thought_budget import MOST_PENDING, ThoughtBudget
from neo_desktop.models.harmony import CHANNEL, END, MARKS, MESSAGE, START
from neo_desktop.models.tokenizer import Tokenizer

HOT = {"temperature": 1.5, "seed": 3, "max_tokens": 120, "thoughts": "open"}
CLOSING = "</think>"


@pytest.fixture(scope="module")
def guide() -> Iterator[Engine]:
    with Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=16_384) as engine:
        yield engine


def complete(guide: Engine, **params: object) -> Completion:
    (completion,) = guide.generate(["Think about it."], SamplingParams(**(HOT | params)))  # type: ignore[arg-type]
    return completion


@pytest.mark.sample(3)
@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_a_thought_ends_with_its_budget(guide: Engine, budget: int) -> None:
    free = complete(guide)
    assert "</think>" not in free.text
    bounded = complete(guide, thought_tokens=budget)
    closing = tuple(guide.tokenizer.encode(CLOSING, False))
    assert bounded.token_ids[:budget] == free.token_ids[:budget]
    assert bounded.token_ids[budget : budget + len(closing)] == closing
    assert len(bounded.token_ids) > budget + len(closing)


def test_other_requests_and_shorter_thoughts_are_untouched(guide: Engine) -> None:
    free = complete(guide)
    assert complete(guide, thought_tokens=1000).token_ids == free.token_ids
    answer = complete(guide, thoughts="possible")
    assert complete(guide, thoughts="possible", thought_tokens=0).token_ids == answer.token_ids


def test_an_enforced_form_follows_the_forced_end(guide: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = grammars.from_json_schema(schema)
    answer = complete(guide, grammar=grammar, grammar_after="</think>", thought_tokens=9)
    assert isinstance(json.loads(answer.text.partition("</think>")[2])["a"], int)


def harmony_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("an", "a"), ("ana", "l")]
    names = [*alphabet, "an", "ana", "anal"]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*MARKS, "<|return|>")])
    return Tokenizer(backend, {"eos_token": "<|return|>"})


def test_a_model_with_channels_chooses_another_channel() -> None:
    tokenizer = harmony_tokenizer()
    budget = ThoughtBudget(tokenizer, 8, is_open=False, num_bits=300)

    def feed(text: str) -> None:
        for token_id in tokenizer.encode(text, False):
            assert budget.mask() is None
            budget.accept(token_id)

    feed(f"{CHANNEL}analysis{MESSAGE}Hm,")
    assert not budget.is_due
    feed("hm")
    assert budget.is_due, f"the end may be forced {MOST_PENDING} tokens later"
    while (mask := budget.mask()) is None:
        budget.accept(tokenizer.encode("?", False)[0])
    forced = []
    while mask is not None:
        (token_id,) = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        forced.append(int(token_id))
        budget.accept(int(token_id))
        mask = budget.mask()
    assert forced == tokenizer.encode(f"{END}{START}assistant", False)
    budget.accept(tokenizer.encode(CHANNEL, False)[0])
    mask = budget.mask()
    assert mask is not None
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert not allowed[tokenizer.encode("analysis", False)[0]]
    assert allowed[tokenizer.encode("final", False)[0]]
    for token_id in tokenizer.encode("final", False):
        budget.accept(token_id)
    feed(f"{MESSAGE}It is so.")
    assert not budget.is_due
