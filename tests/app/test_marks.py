"""The text of messages stays text: only the template's own marks become control tokens."""

import string
from functools import cache
from typing import Any

import pytest
import tokenizers
from chat_families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from neo_desktop.app.generate.history import paired, with_thinking
from neo_desktop.app.generate.tools import format_of
from neo_desktop.app.templates.chat_template import ChatTemplate
from neo_desktop.models.marks import SIGNS, ChatText, Shield
from neo_desktop.models.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
Ids = list[int]


def byte_level(marks: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 3's kind, which looks whole words up, including those of control tokens."""
    texts = [*BYTES, "he", "Ġh", "Ġhe", "ĊĊ", "<|", "|>", *marks]
    pairs = [("h", "e"), ("Ġ", "h"), ("Ġh", "e"), ("Ċ", "Ċ"), ("<", "|"), ("|", ">")]
    backend = tokenizers.Tokenizer(
        models.BPE({text: at for at, text in enumerate(texts)}, pairs, ignore_merges=True)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def spaced(marks: list[str], *, scheme: str | None) -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 2's kind: "▁" for spaces, maybe one before the text or every piece."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁heloab<>", "▁h", "he"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {text: at + at // 100 for at, text in enumerate(texts)},  # ids with holes
            [("▁", "h"), ("h", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    if scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def by_scores(marks: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of T5's kind, which turns text into control tokens by itself."""
    texts = ["<unk>", *ROLES.values(), *marks, "▁", *string.printable, "he", "▁he"]
    pieces = [(text, -float(at)) for at, text in enumerate(dict.fromkeys(texts))]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


KINDS = {
    "byte level": byte_level,
    "prefix": lambda marks: spaced(marks, scheme=None),
    "first": lambda marks: spaced(marks, scheme="first"),
    "always": lambda marks: spaced(marks, scheme="always"),
    "scores": by_scores,
}


@cache
def tokenizer_of(kind: str, family: str) -> Tokenizer:
    source, special, ordinary = FAMILIES[family]
    backend = KINDS[kind]([*special, *ROLES.values()])
    for number, text in enumerate([*ROLES.values(), *special]):
        # Some marks absorb adjacent white space, some match the normalised text.
        strips = number % 3 == 2
        added = AddedToken(
            text,
            special=True,
            rstrip=strips,
            lstrip=number % 5 == 4,
            normalized=kind != "prefix" and number % 2 == 1,
        )
        backend.add_special_tokens([added])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ordinary])
    return Tokenizer(backend, ROLES, source)


def ids_of(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> Ids:
    return tokenizer.encode_chat(written(tokenizer, messages, tools))


def written(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> ChatText:
    shield = Shield(tokenizer.marks, messages, tools)
    return shield.read(render(tokenizer, shield.messages(messages), shield.broken(tools)))


def render(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> str:
    tool_format = format_of(tokenizer.chat_template)
    messages = with_thinking(paired(messages, single_calls=tool_format.single_calls))
    return template_of(tokenizer.chat_template).render(messages, {"tools": tools or None})


@cache
def template_of(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, ROLES)


def a_chat(texts: list[str], role: str = "user") -> tuple[list[Any], list[Any]]:
    """Return a chat with these texts in every place for text."""
    asked, thought, name, key, value, result, described, answer = texts
    call = {"id": "a", "type": "function", "function": {"name": name or "f", "arguments": {key: value}}}
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": described}}}
    messages = [
        {"role": "system", "content": described},
        {"role": role, "content": asked},
        {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": asked},
    ]
    function = {"name": name or "f", "description": described, "parameters": parameters}
    return messages, [{"type": "function", "function": function}]


def texts_with(marks: list[str]) -> st.SearchStrategy[list[str]]:
    parts = [cut for mark in marks for cut in (mark, mark, mark[1:], mark[:-1], mark[-1], mark[0])]
    parts += ["\n", " ", "he", "system", '"', "\\", *SIGNS[:3], "\\ufdd0"]
    texts = st.lists(st.sampled_from(parts) | st.text(max_size=3), max_size=6).map("".join)
    return st.lists(texts, min_size=8, max_size=8)


def surrogate_free(text: str) -> str:
    return text.encode(errors="replace").decode()


NEUTRAL = str.maketrans(dict.fromkeys("<>[]|\uff5c▁/", "-"))


@pytest.mark.parametrize("kind", KINDS)
@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_control_tokens_are_those_of_the_template(kind: str, family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind, family)
    _, special, ordinary = FAMILIES[family]
    marks = [*special, *(text for text in ordinary if text in tokenizer.marks.texts), "<s>", "</s>"]
    texts = [surrogate_free(text) for text in data.draw(texts_with(marks))]
    # The assistant's own text may contain the marks of thoughts and calls: see the next test.
    texts[-1] = texts[-1] if not ordinary else texts[-1].translate(NEUTRAL)
    control = set(tokenizer.special_token_ids) | {tokenizer.encode(text, False)[-1] for text in marks}
    control -= {tokenizer._backend.token_to_id("<unk>")}
    found = [token for token in ids_of(tokenizer, *a_chat(texts)) if token in control]
    plain = as_before(tokenizer, *a_chat([text.translate(NEUTRAL) for text in texts]))
    assert found == [token for token in plain if token in control]


def as_before(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> Ids:
    """Tokenize the rendered text as a whole, which is right as long as no message contains a mark."""
    token_ids = tokenizer.encode(render(tokenizer, messages, tools), add_special_tokens=False)
    start = tokenizer.encode("")
    return token_ids if token_ids[:1] == start else start + token_ids


@pytest.mark.parametrize("kind", KINDS)
@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_without_marks_in_messages_nothing_changes(kind: str, family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind, family)
    texts = [
        surrogate_free(text).translate(NEUTRAL) for text in data.draw(texts_with(["he  he", "<h1>\n\n"]))
    ]
    chat = a_chat(texts)
    assert ids_of(tokenizer, *chat) == as_before(tokenizer, *chat)


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_no_text_is_lost(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte level", family)
    texts = [surrogate_free(text) for text in data.draw(texts_with([*FAMILIES[family].special]))]
    if FAMILIES[family].ordinary:
        texts[-1] = texts[-1].translate(NEUTRAL)
    chat = a_chat(texts)
    assert str(written(tokenizer, *chat)) == render(tokenizer, *chat)


def test_an_assistants_own_marks_of_thoughts_stay() -> None:
    tokenizer = tokenizer_of("byte level", "ChatML")
    said = "<think>hm</think>\n\nhe<|im_end|>"
    messages = [{"role": "assistant", "content": said}, {"role": "user", "content": said}]
    text = written(tokenizer, messages, [])
    assert str(text).startswith("<|im_start|>assistant\nhe<|im_end|><|im_end|>")  # its template drops it
    assert text.pieces[1::2] == ("<|im_start|>", "<|im_end|>") * 2 + ("<|im_start|>", "<think>")
