"""Malicious and dangerously damaged checkpoints: one sentence each, before anything is built."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from safetensors.torch import load_file, save_file

from neo_desktop import Engine
from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.models.config import ModelError
from neo_desktop.models.json_file import MAX_FILE_BYTES, MAX_REASON
from neo_desktop.models.safetensors.folder import MAX_HEADER_BYTES
from neo_desktop.models.tokenizer import MAX_TOKENIZER_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", "llama")


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(folder, device="cpu")


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": 1024},
        {"num_hidden_layers": 1},
        {"hidden_size": 2**31 - 1},
        {"hidden_size": 2**18},
        {"intermediate_size": 2**31 - 1},
        {"intermediate_size": 2**20},
        {"vocab_size": 2**31 - 1},
        {"vocab_size": 2**23},
        {"vocab_size": 319},
        {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 2**31 - 1},
        {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        {"num_key_value_heads": 1},
        {"head_dim": 2**31 - 2},
        {"head_dim": 32},
        {"max_position_embeddings": 2**40},
        {"rms_norm_eps": 1e300},
        {"rms_norm_eps": 10**400},
        {"rope_theta": 1.0, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e-320}},
        {"num_hidden_layers": True},
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": [[[]]] * 10**5},
    ],
)
def test_absurd_and_inconsistent_numbers_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError) as error:
        Engine.from_pretrained(folder, device="cpu")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 1024},
        {"num_local_experts": 7},
        {"moe_intermediate_size": 128},
        {"moe_intermediate_size": 2**20},
        {"mlp_only_layers": []},
        {"mlp_only_layers": [0, 1, 2]},
        {"decoder_sparse_step": 3},
        {"num_experts_per_tok": 9},
        {"model_type": "qwen3"},
        {"model_type": "mixtral"},
    ],
)
def test_experts_that_the_weights_do_not_have_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = save_checkpoint(tmp_path / "model", "qwen3-moe")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError) as error:
        Engine.from_pretrained(folder, device="cpu")
    assert len(str(error.value)) < 1000


def test_a_long_context_costs_nothing_in_itself(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        max_position_embeddings=2**31 - 1,
        rope_scaling={"rope_type": "yarn", "factor": 1e9, "rope_theta": 10000.0},
    )
    with Engine.from_pretrained(folder, device="cpu", policy="gpu-only", gpu_cache_tokens=512) as engine:
        assert engine.max_context_tokens == 512
        assert len(engine.embed([[1, 2, 3]])) == 1


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_files_of_a_gigabyte_are_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(2**30)
    refuse(folder, f"{name} has 1073741824 bytes, more than the {MAX_FILE_BYTES}")


def test_a_tokenizer_of_a_gigabyte_is_not_read(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)
    refuse(folder, f"tokenizer.json has 1073741824 bytes, more than the {MAX_TOKENIZER_BYTES}")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, '{"a": ' + "9" * 10**5 + "}", "nul", ""])
def test_deep_and_broken_json_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    refuse(folder, f"{name} is not valid JSON")


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "{}", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    refuse(folder, r"tokenizer\.json is not a valid tokenizer")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_no_ordinary_file_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    refuse(folder, "regular file|has no weights")
    (folder / name).rmdir()
    (folder / name).symlink_to("/dev/zero")
    refuse(folder, "regular file|has no weights")


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"architectures": [LONG]}),
        ("config.json", {"dtype": LONG}),
        ("config.json", {"rope_scaling": {"rope_type": LONG}}),
        ("tokenizer.json", {"version": LONG}),
        ("tokenizer.json", {"model": LONG}),
    ],
)
def test_what_is_told_stays_short_whatever_a_file_says(
    folder: Path, file: str, changes: dict[str, Any]
) -> None:
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError) as error:
        Engine.from_pretrained(folder, device="cpu")
    assert len(str(error.value)) <= MAX_REASON
    assert str(error.value).startswith(str(folder))
    assert str(error.value).endswith(".")
    assert len(summarize(folder).reason or "") <= MAX_REASON


@pytest.mark.parametrize("name", [LONG, "a/b", "..", "", "\0", {"a": 1}, ["a"], 3, None])
def test_an_index_that_names_no_file_is_refused(folder: Path, name: object) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, r"index\.json")
    assert summarize(folder).reason is not None


def write_weights(folder: Path, header: bytes, data: bytes = b"", size: int | None = None) -> None:
    length = len(header) if size is None else size
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + data)


def one_tensor(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes
    return json.dumps({"model.norm.weight": tensor}).encode()


HEADERS: dict[str, Callable[[Path], object]] = {
    "a header of 10**12 bytes": lambda folder: write_weights(folder, one_tensor(), bytes(16), size=10**12),
    "a header longer than the file": lambda folder: write_weights(folder, one_tensor(), size=10**6),
    "offsets beyond the file": lambda folder: write_weights(folder, one_tensor(data_offsets=[0, 10**12])),
    "offsets that run backwards": lambda folder: write_weights(
        folder, one_tensor(data_offsets=[16, 0]), bytes(16)
    ),
    "offsets that do not fit the shape": lambda folder: write_weights(
        folder, one_tensor(shape=[2**40, 2**40]), bytes(16)
    ),
    "a shape that overflows": lambda folder: write_weights(
        folder, one_tensor(shape=[2**62, 2**62, 2**62]), bytes(16)
    ),
    "a negative shape": lambda folder: write_weights(folder, one_tensor(shape=[-2, -2]), bytes(16)),
    "an unknown type": lambda folder: write_weights(folder, one_tensor(dtype="F128"), bytes(16)),
    "tensors that overlap": lambda folder: write_weights(
        folder,
        json.dumps({n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in "ab"}).encode(),
        bytes(16),
    ),
    "bytes that belong to nobody": lambda folder: write_weights(folder, one_tensor(), bytes(32)),
    "missing bytes": lambda folder: write_weights(folder, one_tensor(), bytes(8)),
    "no JSON": lambda folder: write_weights(folder, b"{" * 1000),
    "deep JSON": lambda folder: write_weights(folder, b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "an empty file": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "a few bytes": lambda folder: (folder / "model.safetensors").write_bytes(b"\1\0\0"),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_weights_are_refused(folder: Path, damage: str) -> None:
    HEADERS[damage](folder)
    refuse(folder, r"model\.safetensors is truncated or damaged")


def test_a_large_header_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    refuse(folder, "is truncated or damaged .a header of")


def test_weights_of_an_unsupported_type_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, file)
    refuse(folder, "stored as I8, which is not supported")
