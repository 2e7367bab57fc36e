"""Answers of gpt-oss are read as those of other models that think first."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from neo_desktop.app.thoughts import ThoughtSplitter
from neo_desktop.models.harmony import MARKS
from neo_desktop.models.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
THOUGHT = "<|channel|>analysis<|message|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>"


def tokenizer_with(marks: tuple[str, ...]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*marks, "<|return|>")])
    return Tokenizer(backend, {"eos_token": "<|return|>"})


def read(tokenizer: Tokenizer, text: str) -> str:
    stream = tokenizer.decode_stream()
    return "".join([stream.step(token) for token in tokenizer.encode(text)]) + stream.flush()


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (
            f"{THOUGHT}Hm, \u00e4.<|end|>{ANSWER}Yes \U0001f642<|return|>",
            "<think>Hm, \u00e4.</think>Yes \U0001f642",
        ),
        ("<|channel|>final<|message|>Yes", "Yes"),
        (
            f"{THOUGHT}One.<|end|><|start|>assistant{THOUGHT}Two.<|end|>{ANSWER}Yes",
            "<think>One.Two.</think>Yes",
        ),
        (f"{THOUGHT}cut off", "<think>cut off"),
        (f"{THOUGHT}Hm.<|end|><|start|>assi", "<think>Hm."),
        ("a completion, without any mark", "a completion, without any mark"),
        ("", ""),
    ],
)
def test_thoughts_are_marked_and_headers_are_no_text(written: str, read_as: str) -> None:
    assert read(tokenizer_with(MARKS), written) == read_as


def test_the_page_and_the_api_tell_them_apart() -> None:
    splitter, tokenizer = ThoughtSplitter(), tokenizer_with(MARKS)
    stream, parts = tokenizer.decode_stream(), []
    for token in tokenizer.encode(f"{THOUGHT}Hm.<|end|>{ANSWER}Yes."):
        parts += list(splitter.feed(stream.step(token)))
    parts += list(splitter.flush())
    kinds = {kind: "".join(text for of, text in parts if of == kind) for kind in ("thought", "answer")}
    assert kinds == {"thought": "Hm.", "answer": "Yes."}


def test_other_vocabularies_are_read_as_before() -> None:
    assert read(tokenizer_with(MARKS[:3]), "<|start|>a<|message|>b") == "ab"
