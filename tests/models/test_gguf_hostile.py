"""Damaged and malicious GGUF files: one sentence each, no crash, little memory."""

import contextlib
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
U32, STRING, ARRAY, UINT64 = 4, 8, 9, 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model in one file."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    types = {"attn_k": "Q4_0", "attn_v": "Q4_1", "ffn_gate": "Q5_0", "ffn_down": "Q5_1", "attn_output": "F16"}
    model = LlamaForCausalLM(config)
    return write_gguf(path, model, type_name="Q8_0", type_names=types).read_bytes()


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    checkpoint.tokenizer()
    form = stored_form(check_model(checkpoint, config), config)
    for kept in (form, DENSE):
        load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=kept)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        read_all(path)
    message = str(error.value)
    assert str(path) in message
    assert len(message) < 1000
    assert message.endswith(".")
    summary = summarize(path)
    assert summary.reason is not None or summary.needs_llamacpp
    return message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "truncated"),
    "other": (b"PK\3\4" + bytes(100), "is not a GGUF file"),
    "version 1": (header(version=1), "of version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no entries": (header(), "lacks 'general.architecture'"),
    "many tensors": (header(tensors=2**60), "1152921504606846976 tensors"),
    "many entries": (header(entries=2**63), "entries of metadata"),
    "long key": (header(entries=1) + struct.pack("<Q", 2**62) + bytes(40), "the name of an entry with"),
    "long string": (header(entries=1) + entry("a", STRING, struct.pack("<Q", 2**62)), "goes beyond"),
    "long array": (header(entries=1) + entry("a", ARRAY, array(U32, 2**61)), "goes beyond"),
    "array of strings": (header(entries=1) + entry("a", ARRAY, array(STRING, 2**61)), "goes beyond"),
    "long in array": (
        header(entries=1) + entry("a", ARRAY, array(STRING, 1) + struct.pack("<Q", 2**64 - 1)),
        "goes beyond",
    ),
    "nested arrays": (
        header(entries=1) + entry("a", ARRAY, array(ARRAY, 1) * 1000),
        "an array of the type 9",
    ),
    "unknown type": (header(entries=1) + entry("a", 99, bytes(8)), "unknown type 99"),
    "not text": (header(entries=1) + struct.pack("<Q", 2) + b"\xff\xff" + bytes(12), "that is not text"),
    "half true": (header(entries=1) + entry("a", 7, b"\2"), "2 as 'a'"),
    "twice": (header(entries=2) + entry("a", U32, number(1)) * 2, "the entry 'a' twice"),
    "alignment": (header(entries=1) + entry("general.alignment", U32, number(3)), "an alignment of 3"),
    "no alignment": (header(entries=1) + entry("general.alignment", U32, number(0)), "an alignment of 0"),
    "alignment in words": (
        header(entries=1) + entry("general.alignment", STRING, text("x" * 999)),
        "an alignment of xxx",
    ),
    "dimensions": (header(tensors=1) + tensor("t", *[1] * 9), "9 dimensions"),
    "no dimensions": (header(tensors=1) + tensor("t") + bytes(16), "0 dimensions"),
    "large": (header(tensors=1) + tensor("t", 2**40, 2**40), "with the shape"),
    "overflow": (header(tensors=1) + tensor("t", 2**32, 2**32), "with the shape"),
    "nothing": (header(tensors=1) + tensor("t", 0, 5), "with the shape"),
    "beyond the end": (header(tensors=1) + tensor("t", 32, 32), "is truncated: t ends at byte"),
    "far offset": (header(tensors=1) + tensor("t", 32, offset=2**63 - 32) + bytes(300), "is truncated"),
    "odd offset": (header(tensors=1) + tensor("t", 32, offset=7) + bytes(300), "not a multiple of 32"),
    "half a block": (header(tensors=1) + tensor("t", 33, kind=8) + bytes(300), "rows of 33, which Q8_0"),
    "type": (
        header(tensors=1) + tensor("t", 32, kind=77) + bytes(300),
        r"not supported \(77\).*neo-desktop\[llamacpp\]",
    ),
    "named twice": (header(tensors=2) + tensor("t", 8) + tensor("t", 8, offset=32) + bytes(300), "'t' twice"),
    "overlap": (
        header(tensors=2) + tensor("t", 16) + tensor("u", 8, offset=32) + bytes(300),
        "place of another",
    ),
    "long name": (header(tensors=1) + tensor("t" * 300, 8) + bytes(300), "the name of a tensor with 300"),
    "three dimensions": (
        header(1, 1)
        + entry("general.architecture", STRING, text("llama"))
        + tensor("t", 2, 2, 2)
        + bytes(99),
        "lacks",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_each_damage_has_a_sentence(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert re.search(message, refusal(path))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_scales_that_are_no_numbers_are_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    offset = GGUFFile(path).tensors["blk.0.ffn_up.weight"].offset
    path.write_bytes(whole[:offset] + b"\xff\x7f" + whole[offset + 2 :])  # NaN in float16
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight .* (values|scales) that are not finite"):
        read_all(path)


EDITS: list[Callable[[bytearray, int, int], Any]] = [
    lambda data, at, value: data.__setitem__(at, value & 255),
    lambda data, at, value: data.__setitem__(slice(at, at + 8), struct.pack("<Q", value)),
    lambda data, at, value: data.__setitem__(slice(at, at + value % 64), b""),
    lambda data, at, value: data.__setitem__(slice(at, at), struct.pack("<I", value & 0xFFFFFFFF)),
    lambda data, at, value: data.__delitem__(slice(at, None)),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(EDITS), st.floats(0, 1), st.integers(0, 2**64 - 1) | st.integers(0, 40)),
        min_size=1,
        max_size=4,
    ),
)
def test_any_damage_is_seen_or_harmless(
    whole: bytes, tmp_path: Path, edits: list[tuple[Callable[[bytearray, int, int], Any], float, int]]
) -> None:
    """Most of the file is tensors, where any bytes are valid, so the test damages the header."""
    data = bytearray(whole)
    description = whole.rindex(b"blk.0") + 100
    for edit, where, value in edits:
        if data:
            edit(data, min(int(where * description), len(data) - 1), value)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        read_all(path)
    summarize(path)


@given(st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=40)), min_size=1, max_size=20))
def test_any_numbers_are_finite_or_refused(
    whole: bytes, tmp_path: Path, edits: list[tuple[float, bytes]]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    data, start = bytearray(whole), min(place.offset for place in GGUFFile(path).tensors.values())
    for where, value in edits:
        at = start + int(where * (len(data) - start))
        data[at : at + len(value)] = value[: len(data) - at]
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config)
    for kept in (form, DENSE):
        with contextlib.suppress(ModelError):
            decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=kept)
            assert all(weight.dense().isfinite().all() for weight in named_weights(decoder))
