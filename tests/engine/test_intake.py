"""Checks and preparation of prompts before they reach an engine."""

import pickle

import pytest
from engine_fakes import make_request

from neo_desktop.engine.errors import ContextLengthError, SettingError
from neo_desktop.engine.grammar import from_json_schema
from neo_desktop.engine.input_processor import CHARS_PER_TOKEN, InputProcessor
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.tokenizer import ByteTokenizer

INTAKE = InputProcessor(ByteTokenizer(), vocab_size=257, max_context_tokens=100, block_size=16)
PARAMS = SamplingParams(max_tokens=5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 95])
def test_the_hashes_are_those_that_the_request_itself_would_find(length: int) -> None:
    prompt = [token % 257 for token in range(length)]
    prepared = INTAKE.prepare(prompt, PARAMS)
    assert prepared.block_hashes == tuple(make_request("x", prompt, PARAMS).block_hashes(16))
    assert len(prepared.block_hashes) == length // 16
    assert pickle.loads(pickle.dumps(prepared)) == prepared


def test_no_prompt_is_hashed_whose_hidden_states_are_asked_for() -> None:
    assert INTAKE.prepare([1] * 64, SamplingParams(pooling="mean")).block_hashes == ()


def test_text_is_tokenised_with_special_tokens_only_where_they_are_wanted() -> None:
    for is_wanted in (True, False):
        prepared = INTAKE.prepare("Hello", PARAMS, add_special_tokens=is_wanted)
        assert list(prepared.token_ids) == ByteTokenizer().encode("Hello", is_wanted)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [3, 257]}, "stop_token_ids"),
        ({"logit_bias": {999: 1.0}}, "logit_bias"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"pooling": "mean", "n": 2}, "pooling"),
        ({"grammar_after": "x"}, "grammar_after"),
    ],
)
def test_an_error_of_a_setting_names_its_field(params: dict[str, object], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        INTAKE.prepare([1], SamplingParams(**params))  # type: ignore[arg-type]
    told = pickle.loads(pickle.dumps(caught.value))
    assert told.field == field
    assert str(told) == str(caught.value)
    assert str(told).startswith(f"{field} ")
    assert str(told.named({field: "another"})) == f"another {told.reason}"


def test_a_grammar_that_is_none_names_its_field() -> None:
    with pytest.raises(SettingError) as caught:
        from_json_schema("{")
    assert caught.value.field == "grammar"


@pytest.mark.parametrize("prompt", ["x" * 100, "x" * (CHARS_PER_TOKEN * 100 + 1), [1] * 96])
def test_what_no_context_holds_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        INTAKE.prepare(prompt, PARAMS)
