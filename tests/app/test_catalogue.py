"""The catalogue of local models, for any content of the folders; its figures agree with the engine's."""

import json
import os
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_folders import gptq, grid, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop import Engine
from neo_desktop.app.bench.hardware.report import Figure, HardwareReport
from neo_desktop.app.bench.section import Spread
from neo_desktop.app.commands.models_command import _fit_rows
from neo_desktop.app.shelf import fits
from neo_desktop.app.shelf.catalogue import BUILTIN_NAME, Catalogue, LocalModel, UnknownModelError
from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.app.shelf.fits import Fit, fit
from neo_desktop.app.shelf.speed import MachineFigures, _cpu_figures, find_figures, predict
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.budget import GIB, FreeMemory
from neo_desktop.engine.profiling.hardware import cpu_name
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form

CPU = torch.device("cpu")


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
    assert models["org/name"].summary.path.name == "aaa"
    assert set(named(Catalogue().models())) == {BUILTIN_NAME, "pulled", "org/name"}
    found = models["flat"].summary
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


def test_two_models_of_one_name_are_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        linked(checkpoint, tmp_path / folder / "twin")
    models = named(Catalogue([tmp_path / "first", tmp_path / "second"]).models())
    assert set(models) == {BUILTIN_NAME, "twin", str(tmp_path / "second" / "twin")}


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
    found = named(Catalogue([tmp_path / "mine"]).models())["broken"].summary
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
    found = Catalogue([tmp_path / "mine"]).get("other").summary
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_no_config_stops_the_list(checkpoint: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        linked(checkpoint, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    put(folder, "config.json", config | changes)
    found = summarize(folder)
    assert (found.reason is None) == (found.config is not None)


SMALL = {"gpu_memory_gib": 0.01, "cpu_memory_gib": 0.02}


@pytest.mark.parametrize(
    ("policy", "dtype"), [("auto", "float32"), ("neo", "bfloat16"), ("gpu-only", "auto")]
)
def test_the_engine_takes_what_was_predicted(checkpoint: Path, policy: str, dtype: str) -> None:
    options = EngineOptions(dtype=dtype, device="cpu", policy=policy, **SMALL)  # type: ignore[arg-type]
    config = ModelConfig.from_pretrained(checkpoint)
    found = fit(config, options, FreeMemory.now(CPU), "nothing is known")
    with Engine.from_options(replace(options, model=checkpoint)) as engine:
        stats = engine.stats()
        pools = {place: pool.num_blocks * stats.block_size for place, pool in stats.pools.items()}
        assert stats.dtype == found.dtype
    assert found.gpu_tokens == pools[KVTier.DEVICE]
    assert found.cpu_tokens == pools.get(KVTier.HOST, 0)
    assert found.gpu_tokens > 0


def of_gpu(
    gpu_gib: float,
    host_gib: float,
    name: str = "llama-3.1-8b",
    policy: str = "auto",
    known: MachineFigures | str = "nothing is known",
) -> Fit:
    """Return the fit of a model on a computer with this GPU and host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neo_desktop.app.shelf.fits.choose_device", lambda _: torch.device("cuda"))
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
        free = FreeMemory(int(host_gib * GIB), int(gpu_gib * GIB))
        return fit(shape(name), EngineOptions(policy=policy), free, known)


def test_offloading_brings_chats_that_the_gpu_alone_has_no_room_for() -> None:
    found = of_gpu(20, 64)
    assert found.reason is None
    assert not found.is_imitated
    assert found.weights_bytes == shape("llama-3.1-8b").weight_bytes(torch.bfloat16)
    assert 0 < found.gpu_chats < 10 < found.chats
    assert found.gpu_chats == found.gpu_tokens // 4096
    assert found.kv_bytes_per_1000_tokens == 131_072_000
    alone = of_gpu(20, 64, policy="gpu-only")
    assert (alone.gpu_chats, alone.chats) == (found.gpu_chats, found.gpu_chats)


def test_what_fits_nowhere_says_how_much_it_needs() -> None:
    found = of_gpu(8, 8)
    assert found.chats == 0
    assert found.host_weights_bytes == 0
    assert "of 16.1 GB of weights" in (found.reason or "")
    assert "7.7 GB of host memory" in (found.reason or "")


def test_what_the_gpu_has_no_room_for_fits_with_a_part_in_host_memory() -> None:
    gpu = get_gpu("rtx-3060-8gb")
    known = MachineFigures(gpu, get_host(gpu.host), True, "a datasheet")
    found = of_gpu(8, 64, known=known)
    assert found.reason is None
    assert 0.4 < found.host_weights_bytes / found.weights_bytes < 0.8
    assert set(found.resident_shares) == {"qkv", "output", "gate_up", "down"}
    assert all(0 < share < 1 for share in found.resident_shares.values())
    assert found.chats > 0
    assert found.speed is not None
    rows = dict(_fit_rows(found))
    assert "in host memory, computed by CPU and GPU together" in rows["Weights"]
    assert "% of gate_up" in rows["On the GPU"]
    with_room = of_gpu(24, 64, known=known)
    assert (with_room.host_weights_bytes, with_room.resident_shares) == (0, {})
    assert with_room.speed is not None
    # CPU and bus together read the weights in host memory; the GPU reads faster.
    assert 41e9 / found.host_weights_bytes * 0.7 < found.speed.one_chat_tokens_per_s
    assert found.speed.one_chat_tokens_per_s < min(
        41e9 / found.host_weights_bytes, with_room.speed.one_chat_tokens_per_s
    )


def figures(read: float) -> MachineFigures:
    return _cpu_figures(read * 1e9, 500e9, "what somebody measured")


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b", "llama-3.1-8b"])
def test_predictions_follow_the_memory_and_never_prefer_a_slower_batch(name: str) -> None:
    config, chats = shape(name), tuple(zip(MEASURED_TIERS, (4, 9), strict=True))
    slow, fast = (predict(figures(read), config, torch.bfloat16, chats, 4096) for read in (20, 80))
    assert slow.one_chat_tokens_per_s < fast.one_chat_tokens_per_s
    for each in (slow, fast):
        assert each.best_tokens_per_s >= each.one_chat_tokens_per_s
        assert 1 <= each.best_chats <= 13
        assert each.best_tokens_per_s == pytest.approx(each.best_chats / each.best_ms_per_token * 1e3)
        assert "what somebody measured" in each.assumption
    if name == "llama-3.1-8b":  # bound by reading the weights
        assert slow.one_chat_tokens_per_s < 20e9 / config.weight_bytes(torch.bfloat16)


def test_quantised_weights_are_reckoned_and_predicted_by_their_true_bytes() -> None:
    config = shape("llama-3.1-8b")

    def of(form: WeightFormat) -> Fit:
        free = FreeMemory(64 * GIB, None)
        return fit(config, EngineOptions(device="cpu", dtype="bfloat16"), free, figures(20), form)

    dense, quantised = of(DENSE), of(uniform_form(config, "Q4_K"))
    assert dense.weights_bytes == config.weight_bytes(torch.bfloat16)
    assert quantised.weights_bytes == pytest.approx(dense.weights_bytes * 4.6 / 16, rel=0.05)
    assert (dense.weights_become, quantised.weights_become) == ("bfloat16", "kept as they are")
    assert quantised.chats > dense.chats
    assert quantised.speed is not None
    assert dense.speed is not None
    assert not quantised.speed.is_measured
    assert quantised.speed.one_chat_tokens_per_s > 2.5 * dense.speed.one_chat_tokens_per_s


@pytest.mark.parametrize(
    ("type_name", "on_cpu", "on_gpu"),
    [
        ("Q4_K", "kept as they are", "kept as they are"),
        ("Q3_K", "Q3_K in 6 bits, others kept as they are", "Q3_K in 4 bits, others kept as they are"),
        ("Q5_0", "kept as they are", "Q5_0 in 8 bits, others kept as they are"),
        ("IQ4_XS", "IQ4_XS in 8 bits, others kept as they are", "dequantised to float16"),
        ("MXFP4", "kept as they are", "MXFP4 in 8 bits, others kept as they are"),
    ],
)
def test_what_becomes_of_quantised_weights_is_told_for_the_device_that_is_there(
    type_name: str, on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shape("llama-3.1-8b")
    form = uniform_form(config, type_name)

    def told(free: FreeMemory) -> str:
        return fit(config, EngineOptions(dtype="float16"), free, figures(20), form).weights_become

    assert told(FreeMemory(64 * GIB, None)) == on_cpu
    monkeypatch.setattr(fits, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(fallbacks, "level", lambda ladder_name: "triton")
    monkeypatch.setattr(fits, "find_tables", lambda *args: None)
    assert told(FreeMemory(64 * GIB, 24 * GIB)) == on_gpu


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


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),  # not the same card as the 4070
    ],
)
def test_a_gpu_is_predicted_from_its_own_datasheet_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, name: str, preset: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = find_figures(torch.device("cuda"))
    if preset is None:
        assert isinstance(found, str)
        assert name in found
    else:
        assert isinstance(found, MachineFigures)
        assert found.gpu.name == preset
        assert (
            predict(
                found,
                shape("llama-3.1-8b"),
                torch.float16,
                tuple(zip(MEASURED_TIERS, (3, 20), strict=True)),
                4096,
            ).best_chats
            >= 3
        )


def test_what_the_self_test_measured_here_comes_before_any_datasheet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Unknown 9000")
    measured = {
        "host reads": (20.0, 40.0),
        "CPU matrix products, float32": (500.0,),
        "GPU reads": (400.0,),
        "GPU matrix products, float16": (80_000.0,),
        "host to GPU": (12.0,),
        "GPU to host": (13.0,),
    }
    hardware = HardwareReport(
        rounds=3,
        memory_bytes=GIB,
        last_level_cache_bytes=0,
        huge_pages=True,
        isa="avx2",
        torch_threads=2,
        gpu_name="NVIDIA Unknown 9000",
        gpu_note="",
        gpu_memory_bytes=GIB,
        figures=tuple(
            Figure(what, "", 1.0, "", Spread.of([value]))
            for what, values in measured.items()
            for value in values
        ),
        notes=(),
    )
    report = {"machine": {"cpu": cpu_name()}, "started": "2026-11-22T20:00:00", "suites": [asdict(hardware)]}
    for name, text in (
        ("2026-1", json.dumps(report)),
        ("2026-2", "{"),
        ("2026-3", json.dumps({"suites": 3})),
    ):
        put(tmp_path / name, "report.json", text)
    for device in ("cuda", "cpu"):
        found = find_figures(torch.device(device), tmp_path)
        assert isinstance(found, MachineFigures)
        assert "the self-test measured on this computer on 2026-11-22" in found.source
        assert found.host.memory_bytes_per_s == 40e9
        assert found.gpu.memory_bytes_per_s == (400e9 if device == "cuda" else 40e9)
    report["machine"]["cpu"] = "another one"  # type: ignore[index]
    put(tmp_path / "2026-1", "report.json", json.dumps(report))
    assert isinstance(find_figures(torch.device("cuda"), tmp_path), str)
