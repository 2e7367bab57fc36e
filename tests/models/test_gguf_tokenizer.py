"""Tokenizers of GGUF files give llama.cpp's ids, or its recorded ids if it is not installed."""

import hashlib
import importlib
import importlib.util
import json
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import TEXTS, byte_level, gemma_4, sentence_piece, write_vocabulary

from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from neo_desktop.models.gguf.tokenizer import make_tokenizer
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.tokenizer import Tokenizer

RECORDED = Path(__file__).parent / "gguf_tokens.json"
PREFIX = "tokenizer.ggml."
ENDS = {f"{PREFIX}add_bos_token": True, f"{PREFIX}add_eos_token": True}
NO_ENDS = {f"{PREFIX}add_bos_token": False, f"{PREFIX}add_space_prefix": False}
VOCABULARIES: dict[str, Callable[[], dict[str, Any]]] = {
    **{pre: partial(byte_level, pre) for pre in PRE_TOKENIZERS},
    "with ends": partial(byte_level, "qwen2", **ENDS),
    "llama": sentence_piece,
    "llama without prefix": partial(sentence_piece, **NO_ENDS),
    "llama with ends": partial(sentence_piece, **ENDS),
    "gemma4": gemma_4,
}
OF_LLAMA_CPP = [name for name in VOCABULARIES if name != "gemma4"]
# For these, llama.cpp ends words at combining marks (vowel signs, separate accents). The vocabularies'
# authors do not, and neither does this program.
CASED = ("tekken", "gpt-4o", "llama4")


def tokenizer(path: Path, entries: dict[str, Any]) -> Tokenizer:
    return make_tokenizer(Vocabulary.read(GGUFFile(write_vocabulary(path, entries))))


def texts_of(name: str) -> list[str]:
    return [text for text in TEXTS if name not in CASED or not any(map(is_mark, text))]


def is_mark(char: str) -> bool:
    return unicodedata.category(char).startswith("M")


@pytest.mark.parametrize("name", OF_LLAMA_CPP)
def test_ids_are_those_that_llama_cpp_gave(name: str, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "vocabulary.gguf", VOCABULARIES[name]())
    recorded = dict(zip(TEXTS, json.loads(RECORDED.read_text())[name].split(), strict=True))
    texts = texts_of(name)
    assert len(texts) > 20
    assert {text: digest(ours.encode(text)) for text in texts} == {text: recorded[text] for text in texts}


@pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OF_LLAMA_CPP)
def test_ids_are_those_that_llama_cpp_gives(name: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    ours = tokenizer(path, VOCABULARIES[name]())
    expected = ids_of_llama_cpp(path)
    for text in texts_of(name):
        assert ours.encode(text) == expected[text], text


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_come_back_whole(name: str, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "vocabulary.gguf", VOCABULARIES[name]())
    for text in TEXTS:
        token_ids = ours.encode(text, add_special_tokens=False)
        stream = ours.decode_stream()
        streamed = "".join(stream.step(token) for token in token_ids) + stream.flush()
        if "<|" not in text:  # special tokens have no text
            assert ours.decode(token_ids) == text
            assert streamed == text


def test_control_tokens_are_special_and_others_are_text(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "vocabulary.gguf", byte_level("qwen2"))
    token_ids = ours.encode("<|user|>Hi<|end|><|assistant|>")
    assert ours.decode(token_ids) == "Hi<|assistant|>"
    assert ours.eos_token_ids == (ours.encode("<|end|>")[0],)
    assert ours.special_tokens == {"eos_token": "<|end|>", "bos_token": "<|user|>"}


def test_gemma_4_merges_within_lines(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "vocabulary.gguf", entries := gemma_4())
    tokens = entries[f"{PREFIX}tokens"]

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in ours.encode(text)]

    assert pieces("a") == ["<bos>", "a"]  # always, and no space before the text
    assert pieces("a\n\nb") == ["<bos>", "a", "\n\n", "b"]
    assert pieces(" \u2603\u2622") == ["<bos>", "▁", "☃", "<0xE2>", "<0x98>", "<0xA2>"]
    assert all(set(piece) == {"\n"} or "\n" not in piece for text in TEXTS for piece in pieces(text))


def test_gemma_4_has_a_few_texts_twice(tmp_path: Path) -> None:
    entries = gemma_4()
    size = len(entries[f"{PREFIX}tokens"])
    more: dict[str, list[Any]] = {"tokens": ["a"], "token_type": [1]}
    for key, values in more.items():
        entries[PREFIX + key] = entries[PREFIX + key] + values
    ours = tokenizer(tmp_path / "vocabulary.gguf", entries)
    assert ours.encode("a")[1:] == [size]
    assert ours.decode([size]) == "a"


def test_gpt_oss_goes_on_after_the_end_of_a_thought(tmp_path: Path) -> None:
    entries = byte_level("gpt-4o")
    more = ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"]
    entries[f"{PREFIX}tokens"] = [*entries[f"{PREFIX}tokens"], *more]
    entries[f"{PREFIX}token_type"] = [*entries[f"{PREFIX}token_type"], *[3] * len(more)]
    write_vocabulary(tmp_path / "vocabulary.gguf", entries)
    vocabulary = Vocabulary.read(GGUFFile(tmp_path / "vocabulary.gguf"))
    assert {vocabulary.tokens[token] for token in vocabulary.end_ids} == {"<|call|>", "<|return|>"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "has no scores"),
        ({"scores": [1.0]}, "scores for each token"),
        ({"token_type": [1, 1]}, "token_type for each token"),
        (
            {"token_type": lambda entries: [float("nan")] * len(entries[f"{PREFIX}scores"])},
            "token_type for each",
        ),
        ({"tokens": ["a", "a"]}, "the same token twice"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "has no tokenizer.ggml.tokens"),
        ({"model": "t5"}, "of the kind 't5'"),
        ({"model": 3}, "'model' = 3, which is not a string"),
        ({"add_bos_token": 7}, "which is not true or false"),
        ({"bos_token_id": "x"}, "which is not an integer"),
    ],
)
def test_damaged_vocabularies_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    entries = sentence_piece()
    entries |= {PREFIX + key: each(entries) if callable(each) else each for key, each in changes.items()}
    entries = {key: value for key, value in entries.items() if value is not None}
    path = write_vocabulary(tmp_path / "vocabulary.gguf", entries)
    with pytest.raises(ModelError, match=message):
        make_tokenizer(Vocabulary.read(GGUFFile(path)))


def test_merges_of_what_is_no_token_are_refused(tmp_path: Path) -> None:
    entries = byte_level("qwen2", **{f"{PREFIX}merges": ["nowhere found"]})
    path = write_vocabulary(tmp_path / "vocabulary.gguf", entries)
    with pytest.raises(ModelError, match="invalid vocabulary"):
        make_tokenizer(Vocabulary.read(GGUFFile(path)))


def digest(token_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:8]


def ids_of_llama_cpp(path: Path) -> dict[str, list[int]]:
    theirs = importlib.import_module("llama_cpp").Llama(str(path), vocab_only=True, verbose=False)
    return {text: theirs.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS}


def record(folder: Path) -> None:
    """Record llama.cpp's ids; needs tests/support on the path, and llama-cpp-python."""
    found = {}
    for name in OF_LLAMA_CPP:
        ids = ids_of_llama_cpp(write_vocabulary(folder / "vocabulary.gguf", VOCABULARIES[name]()))
        found[name] = " ".join(digest(ids[text]) for text in TEXTS)
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    ours = tokenizer(tmp_path / "vocabulary.gguf", byte_level("qwen2", **templates))
    assert [ours.chat_template_for(has_tools=has_tools) for has_tools in (False, True)] == ["plain", "tools"]
    assert tokenizer(tmp_path / "other.gguf", byte_level("qwen2")).chat_template is None


def test_chats_begin_as_other_texts_do(tmp_path: Path) -> None:
    for name in ("with ends", "llama", "llama without prefix"):
        ours = tokenizer(tmp_path / "vocabulary.gguf", VOCABULARIES[name]())
        chat = "<|user|>Hi <|end|> there"
        start = ours.encode("")[: ours.bos_token_id in ours.encode("")]
        expected = ours.encode(chat, add_special_tokens=False)
        if expected[:1] != start:
            expected = start + expected
        assert ours.encode_chat(ours.marks.split(chat)) == expected
