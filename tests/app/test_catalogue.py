"""The catalogue of local models, for any content of the folders."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from quantised_folders import gptq, grid, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue, UnknownModelError
from neo_desktop.app.shelf.checkpoint_summary import LocalModel, summarize
from neo_desktop.models.config import ModelConfig


@pytest.fixture(autouse=True)
def _no_other_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("saved") / "tiny-llama", "llama")


def linked(checkpoint: Path, folder: Path) -> Path:
    """Link a checkpoint's files into a new folder, so that a test can replace some files."""
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def put(folder: Path, name: str, content: str | bytes | dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    data = json.dumps(content) if isinstance(content, dict) else content
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def named(models: list[LocalModel]) -> dict[str, LocalModel]:
    return {model.name: model for model in models}


def test_models_of_all_folders_are_found_and_described(checkpoint: Path, tmp_path: Path) -> None:
    linked(checkpoint, tmp_path / "mine" / "flat")
    linked(checkpoint, tmp_path / "mine" / "org" / "nested")
    linked(checkpoint, tmp_path / "data" / "models" / "pulled")
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    linked(checkpoint, repository / "snapshots" / "aaa")
    linked(checkpoint, repository / "snapshots" / "bbb")
    put(repository / "refs", "main", "aaa")
    models = named(Catalogue([tmp_path / "mine", tmp_path / "hf" / "hub"]).models())
    assert list(models) == [BUILTIN_NAME, "pulled", "flat", "org/nested", "org/name"]
    assert models["org/name"].path.name == "aaa"
    assert set(named(Catalogue().models())) == {BUILTIN_NAME, "pulled", "org/name"}
    found = models["flat"]
    assert found.reason is None
    assert found.config == ModelConfig.from_pretrained(checkpoint)
    assert found.parameters == found.config.num_parameters
    assert (found.architecture, found.dtype, found.context_tokens) == ("LlamaForCausalLM", "float32", 512)
    assert found.size_bytes == sum(file.stat().st_size for file in checkpoint.iterdir())


def test_the_model_asked_for_is_first_by_folder_or_by_name(checkpoint: Path, tmp_path: Path) -> None:
    folder = linked(checkpoint, tmp_path / "mine" / "org" / "nested")
    by_folder = Catalogue([], model=str(folder))
    assert by_folder.first == "nested"
    assert by_folder.get("nested").source == str(folder)
    by_name = Catalogue([tmp_path / "mine"], model="org/nested")
    assert by_name.get(by_name.first).source == str(folder)
    assert Catalogue([], model="builtin").get("builtin").source == "builtin"
    assert Catalogue([], shape="qwen3-8b").models()[0].shape == "qwen3-8b"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc", "mine/../../secret", "..", "", "flat/../../secret", "a\0b"]
)
def test_a_name_is_never_a_path(checkpoint: Path, tmp_path: Path, name: str) -> None:
    linked(checkpoint, tmp_path / "secret")
    linked(checkpoint, tmp_path / "mine" / "flat")
    with pytest.raises(UnknownModelError):
        Catalogue([tmp_path / "mine"]).get(name)


def test_links_in_circles_and_endless_folders_end(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "loop").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "self").symlink_to(tmp_path / "mine" / "self")
    for number in range(3000):
        (tmp_path / "mine" / f"folder{number}").mkdir()
    assert set(named(Catalogue([tmp_path / "mine", tmp_path / "nowhere"]).models())) == {BUILTIN_NAME}


def header(tensors: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("config.json", " " * (9 << 20), "that are allowed"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", {"architectures": ["MambaForCausalLM"]}, "not supported"),
        ("model.safetensors", b"", "damaged"),
        ("model.safetensors", b"\xff" * 100, "damaged"),
        ("model.safetensors", header({"a": TENSOR}), "damaged"),
        ("model.safetensors", header({"a": TENSOR}, 2**62), "damaged"),
        ("model.safetensors", header({"a": 3}), "damaged"),
        ("model.safetensors", header({"a": TENSOR | {"shape": [-1]}}), "damaged"),
        ("model.safetensors", header({}), "lacks the weights"),
        ("model.safetensors", header({"a": TENSOR}) + b"\0" * 16, "lacks the weights"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../../etc/passwd"}}, "complete the"),
        ("model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors"}}, "complete the"),
        ("model.safetensors.index.json", {"weight_map": {"a": 3}}, "is not a string"),
        ("generation_config.json", "{", "not valid JSON"),
    ],
)
def test_what_is_damaged_is_listed_with_the_reason(
    checkpoint: Path, tmp_path: Path, file: str, content: str | bytes | dict[str, Any], reason: str
) -> None:
    folder = linked(checkpoint, tmp_path / "mine" / "broken")
    put(folder, file, content)
    found = named(Catalogue([tmp_path / "mine"]).models())["broken"]
    assert found.config is None
    assert found.reason is not None
    assert reason in found.reason


def test_a_config_of_a_billion_layers_takes_no_memory(checkpoint: Path, tmp_path: Path) -> None:
    folder = linked(checkpoint, tmp_path / "broken")
    config = json.loads((checkpoint / "config.json").read_text())
    put(folder, "config.json", config | {"num_hidden_layers": 10**9})
    before = memory_peak_kib()
    assert "1000000000 layers" in (summarize(folder).reason or "")
    put(folder, "config.json", config | {"num_hidden_layers": 1000, "vocab_size": 2**20})
    assert "lacks the weights" in (summarize(folder).reason or "")
    assert memory_peak_kib() - before < 100 << 10


def memory_peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.parametrize(
    ("files", "reason", "dtype"),
    [
        (["config.json", "pytorch_model.bin"], "pickle", None),
        (["config.json"], "no weights", None),
        (["llama-3-8b.Q4_K_M.gguf"], "Q4_K_M.gguf is not a GGUF file", "GGUF"),
        (["model.safetensors"], "no config.json", None),
    ],
)
def test_other_files_are_listed_with_what_to_do(
    checkpoint: Path, tmp_path: Path, files: list[str], reason: str, dtype: str | None
) -> None:
    for file in files:
        source = checkpoint / file
        put(tmp_path / "mine" / "other", file, source.read_bytes() if source.exists() else b"x")
    found = Catalogue([tmp_path / "mine"]).get("other")
    assert reason in (found.reason or "")
    assert found.dtype == dtype


def test_quantized_models_say_how(checkpoint: Path, tmp_path: Path) -> None:
    folder = linked(checkpoint, tmp_path / "quantized")
    config = json.loads((checkpoint / "config.json").read_text())
    put(folder, "config.json", config | {"quantization_config": {"quant_method": "gptq", "bits": 3}})
    found = summarize(folder)
    assert found.dtype == "gptq, 3 bits"
    assert "quantised by 'gptq' to 3 bits" in (found.reason or "")


def test_models_of_packed_matrices_are_summarized_as_they_are_loaded(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "packed", "qwen2")
    whole = summarize(folder)

    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rounded = grid(weight, group=16)
        return gptq(rounded), rounded.exact

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    quantise(folder, settings, make)
    found = summarize(folder)
    assert found.reason is None
    assert found.dtype == "F32 and GPTQ 4-bit, group 16"
    assert found.is_quantised
    assert found.parameters == whole.parameters
    assert found.size_bytes < whole.size_bytes
    assert found.form.without_kernel == ("GPTQ 4-bit, group 16",)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.qzeros"]
    save_file(weights, folder / "model.safetensors")
    assert "lacks model.layers.0.mlp.up_proj.qzeros" in (summarize(folder).reason or "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    "architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings",
    "vocab_size", "torch_dtype", "eos_token_id", "quantization_config", "sliding_window",
    "layer_types", "intermediate_size",
]  # fmt: skip


@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_no_config_stops_the_list(checkpoint: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        linked(checkpoint, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    put(folder, "config.json", config | changes)
    found = summarize(folder)
    assert (found.reason is None) == (found.config is not None)


def test_the_hubs_cache_is_where_its_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from neo_desktop.app.shelf.catalogue import hub_folder  # noqa: PLC0415

    assert hub_folder() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert hub_folder() == tmp_path / "elsewhere"
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_folder() == tmp_path / "huggingface" / "hub"
    assert os.environ["XDG_CACHE_HOME"]
