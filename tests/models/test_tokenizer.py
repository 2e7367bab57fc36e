"""Tokenizers agree with `transformers`, and streamed pieces add up to the whole text."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from neo_desktop.models.json_file import ModelError
from neo_desktop.models.tokenizer import ByteTokenizer, Tokenizer

CORPUS = [
    "The cache holds keys and values; the scheduler decides what runs where.",
    "Größe, naïve, façade: 日本語のテキスト и немного кириллицы.",
    "1 + 1 = 2, 👍🏽 and 😀 are longer than a byte, ok?\n\n\tdone",
]
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 3's and Qwen's: byte-level BPE; tokens may end inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(ROLES.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's and Mistral's: "▁" for spaces, `<0xNN>` for unknown characters."""
    texts = ["<unk>", *ROLES.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", *"abcdehlorstuw", "▁h", "lo", "▁w", "▁the", "é"]
    merges = [("▁", "h"), ("l", "o"), ("▁", "w")]
    model = models.BPE(
        {text: i for i, text in enumerate(texts)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", *ROLES.values()])
    return backend


BACKENDS = {"byte-level": byte_level_backend, "byte-fallback": byte_fallback_backend}


def save(path: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(ROLES | config))
    return path


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    stream = tokenizer.decode_stream()
    return "".join([stream.step(token_id) for token_id in token_ids]) + stream.flush()


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_encode_and_decode_agree_with_transformers(kind, adds_bos, tmp_path):
    backend = BACKENDS[kind]()
    if adds_bos:
        ids = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=ids)
    path = save(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast")
    ours = Tokenizer.from_pretrained(path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    assert (ours.encode("a")[0] == ours.bos_token_id) == adds_bos
    for text in ["", " ", "hello world", "the </s> end", *CORPUS]:
        for special in (True, False):
            token_ids = ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(
                    token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_tokens.items() >= ROLES.items()


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
@pytest.mark.parametrize(
    "tokenizer", [Tokenizer(make(), ROLES) for make in BACKENDS.values()] + [ByteTokenizer()]
)
def test_pieces_of_any_text_add_up_to_it(tokenizer, text):
    token_ids = tokenizer.encode(text)
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)


@given(data=st.data())
@pytest.mark.parametrize("tokenizer", [Tokenizer(byte_level_backend(), ROLES), ByteTokenizer()])
def test_pieces_of_any_bytes_add_up_to_what_decode_gives(tokenizer, data):
    # A model may emit anything: halves of characters, special tokens, ids that its tokenizer lacks.
    ids = st.integers(0, tokenizer.vocab_size + 5)
    token_ids = data.draw(st.lists(ids, max_size=50))
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)


@given(data=st.data())
def test_broken_bytes_of_a_byte_fallback_vocabulary_are_streamed_without_failing(data):
    tokenizer = Tokenizer(byte_fallback_backend(), ROLES)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=50))
    assert isinstance(streamed(tokenizer, token_ids), str)


@pytest.mark.parametrize("tokenizer", [Tokenizer(byte_level_backend(), ROLES), ByteTokenizer()])
def test_no_piece_shows_half_a_character(tokenizer):
    stream = tokenizer.decode_stream()
    pieces = [stream.step(token_id) for token_id in tokenizer.encode("日本 😀👍🏽 é")]
    assert "".join(pieces) == "日本 😀👍🏽 é"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) >= 5


def test_a_broken_byte_does_not_blot_out_the_characters_before_it():
    tokenizer = Tokenizer(byte_fallback_backend(), ROLES)
    token_ids = tokenizer.encode("日本")[-6:-1]
    stream = tokenizer.decode_stream()
    assert "".join([stream.step(token_id) for token_id in token_ids]) == "日"
    assert set(stream.flush()) == {"\N{REPLACEMENT CHARACTER}"}


def test_a_character_that_never_ends_is_flushed():
    tokenizer = ByteTokenizer()
    stream = tokenizer.decode_stream()
    token_ids = list("ab😀".encode())[:-1]
    assert "".join([stream.step(token_id) for token_id in token_ids]) == "ab"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


@pytest.mark.parametrize("make", [byte_level_backend, byte_fallback_backend])
def test_token_bytes_add_up_to_the_text(make):
    tokenizer = Tokenizer(make(), ROLES)
    for text in ["hello world", "日本 😀", "the\n\ttable</s>"]:
        token_ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode().lstrip() == text
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        ByteTokenizer().encode("a\ud83d")


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_pretrained(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_roles_may_be_objects_or_stand_in_the_older_file(tmp_path):
    save(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "</s>"}, "model_max_length": 9}'
    )
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "<s>"}')
    assert Tokenizer.from_pretrained(tmp_path).special_tokens == ROLES


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "from config"}, None, "from config"),
        ({"chat_template": "from config"}, "from file", "from file"),
        (
            {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]},
            None,
            "yes",
        ),
        ({"chat_template": [{"name": "rag", "template": "only"}]}, None, "only"),
    ],
)
def test_the_chat_template_is_found(config, jinja, expected, tmp_path):
    save(tmp_path, byte_level_backend(), **config)
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert Tokenizer.from_pretrained(tmp_path).chat_template == expected


@pytest.mark.parametrize("damage", ["", "{}", '{"model": 3}', "null"])
def test_a_broken_tokenizer_is_named(damage, tmp_path):
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer.*download"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_folder_may_have_a_template_for_tools(tmp_path):
    save(tmp_path, byte_level_backend())
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    found = Tokenizer.from_pretrained(tmp_path)
    assert [found.chat_template_for(has_tools=has_tools) for has_tools in (False, True)] == ["plain", "tools"]
