"""Measured tables are reused only for the exact configuration they were measured on; bad files do no harm."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.profiling import profile_cache
from neo_desktop.engine.profiling.profile_cache import find_tables, load_or_profile, profile_key, profile_path
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.shapes import shape

CONFIG = shape("tiny")
CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_batch_tokens=64, max_batch_requests=16)


def tables(ms: float) -> TableCostModel:
    curve, surface = Curve([1, 8], [ms, 2 * ms]), Surface([1, 8], [16, 64], [[ms, ms], [ms, ms]])
    return TableCostModel(
        2, False, 0.1, curve, curve, curve, curve, curve, surface, dict.fromkeys(MEASURED_TIERS, surface)
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[TableCostModel]:
    """Return the list of measurements; each measurement gives different times."""
    results: list[TableCostModel] = []

    def profile(*_: Any, **__: Any) -> TableCostModel:
        results.append(tables(1.0 + len(results)))
        return results[-1]

    monkeypatch.setattr(profile_cache, "profile", profile)
    return results


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(CONFIG, dtype=torch.float32, device=CPU)


@pytest.fixture
def storage() -> KVStorage:
    return storage_of({KVTier.DEVICE: 8, KVTier.HOST: 8})


def storage_of(blocks: dict[KVTier, int], cpu_cache_dtype: torch.dtype = torch.float32) -> KVStorage:
    dtypes = {KVTier.DEVICE: torch.float32, KVTier.HOST: cpu_cache_dtype}
    return KVStorage(
        {tier: KVPool(CONFIG, count, BLOCK_SIZE, dtypes[tier], CPU) for tier, count in blocks.items()}
    )


def same(first: TableCostModel, second: TableCostModel) -> bool:
    return json.dumps(first.to_json()) == json.dumps(second.to_json())


def test_what_was_measured_is_found_at_the_next_start(
    decoder: Decoder, storage: KVStorage, measured: list[TableCostModel], folder: Path
) -> None:
    first = load_or_profile(decoder, storage, LIMITS)
    second = load_or_profile(decoder, storage, LIMITS)
    assert len(measured) == 1
    assert same(first, second)
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no temporary file remains


MODEL_CHANGES = [
    {"hidden_size": 128},
    {"intermediate_size": 192},
    {"num_layers": 3, "layer_windows": (None,) * 3},
    {"num_heads": 8},
    {"num_kv_heads": 1},
    {"head_dim": 32},
    {"vocab_size": 300},
    {"max_context_tokens": 8192},
    {"layer_windows": (None, 128)},
    {"qkv_bias": True},
    {"output_bias": True},
    {"mlp_bias": True},
    {"qk_norm": True},
    {"attention_softcap": 50.0},
]


@pytest.mark.parametrize("changes", MODEL_CHANGES, ids=lambda changes: next(iter(changes)))
def test_another_model_has_another_key(storage: KVStorage, changes: dict[str, Any]) -> None:
    one = Decoder(CONFIG, dtype=torch.float32, device=CPU)
    other = Decoder(replace(CONFIG, **changes), dtype=torch.float32, device=torch.device("meta"))
    other.device = CPU
    assert profile_key(one, storage, LIMITS)["model"] != profile_key(other, storage, LIMITS)["model"]


@pytest.mark.parametrize(
    "target",
    [
        "neo_desktop.engine.profiling.profile_cache.__version__",
        "neo_desktop.engine.profiling.profile_cache.PROFILER_VERSION",
        "neo_desktop.engine.profiling.profile_cache.BLOCK_SIZE",
        "neo_desktop.engine.profiling.hardware.cpu_name",
        "neo_desktop.native.default_num_threads",
        "neo_desktop.native.default_isa",
        "torch.__version__",
        "torch.get_num_threads",
    ],
)
def test_another_machine_or_version_has_another_key(
    target: str, decoder: Decoder, storage: KVStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profile_key(decoder, storage, LIMITS)
    is_value = target.rpartition(".")[2] in ("__version__", "PROFILER_VERSION", "BLOCK_SIZE")
    monkeypatch.setattr(target, 99 if is_value else lambda: "another")
    after = profile_key(decoder, storage, LIMITS)
    assert sum(before[name] != after[name] for name in before) == 1
    assert profile_path(before) != profile_path(after)


def test_another_gpu_or_driver_has_another_key(storage: KVStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(CONFIG, dtype=torch.float16, device=torch.device("meta"))
    decoder.device = torch.device("cuda")
    gpu = SimpleNamespace(name="Tesla T4", multi_processor_count=40, total_memory=15 << 30, major=7, minor=5)
    driver = ["570.1"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(profile_cache.hardware, "driver_version", lambda: driver[0])
    paths = {profile_path(profile_key(decoder, storage, LIMITS))}
    for field, value in (("name", "NVIDIA L4"), ("multi_processor_count", 8), ("total_memory", 24 << 30)):
        setattr(gpu, field, value)
        paths.add(profile_path(profile_key(decoder, storage, LIMITS)))
    driver[0] = "580.2"
    paths.add(profile_path(profile_key(decoder, storage, LIMITS)))
    for sms in (16, 24):  # sizes of a GPU slice
        streams = SimpleNamespace(sms=sms)
        paths.add(profile_path(profile_key(decoder, storage, LIMITS, cast("Streams", streams))))
    assert len(paths) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"key": {}, "tables": {}}',
        "\x00\xff" * 100,
    ],
)
def test_a_damaged_file_is_told_and_measured_again(
    text: str,
    decoder: Decoder,
    storage: KVStorage,
    measured: list[TableCostModel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_or_profile(decoder, storage, LIMITS)
    path = profile_path(profile_key(decoder, storage, LIMITS))
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        second = load_or_profile(decoder, storage, LIMITS)
    assert str(path) in caplog.text
    assert len(measured) == 2
    assert same(load_or_profile(decoder, storage, LIMITS), second)  # the file is repaired


def test_a_folder_that_cannot_be_written_to_is_only_a_warning(
    tmp_path: Path,
    decoder: Decoder,
    storage: KVStorage,
    measured: list[TableCostModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a file").write_text("not a folder")
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "a file"))
    with caplog.at_level(logging.WARNING):
        assert same(load_or_profile(decoder, storage, LIMITS), measured[0])
    assert "NEO_DESKTOP_CACHE" in caplog.text


def test_tables_of_a_model_are_found_before_it_is_loaded(
    decoder: Decoder, storage: KVStorage, measured: list[TableCostModel], folder: Path
) -> None:
    assert find_tables(CONFIG, torch.float32, CPU, set()) is None
    load_or_profile(decoder, storage, LIMITS)
    other = storage_of({KVTier.DEVICE: 64, KVTier.HOST: 8})  # more KV memory does not make another machine
    newest = load_or_profile(decoder, other, LIMITS)
    old, *_ = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    os.utime(old, (0, 0))
    found = find_tables(CONFIG, torch.float32, CPU, set())
    assert found is not None
    assert same(found, newest)
    assert find_tables(CONFIG, torch.bfloat16, CPU, set()) is None
    assert find_tables(CONFIG, torch.float32, CPU, {"Q4_0"}) is None
    assert find_tables(replace(CONFIG, num_layers=3), torch.float32, CPU, set()) is None
    assert find_tables(CONFIG, torch.float32, CPU, set(), in_host_memory=0.3) is None
    assert find_tables(CONFIG, torch.float32, CPU, set(), in_host_memory=0.03) is not None
    (folder / "torn.json").write_text("{")
    assert find_tables(CONFIG, torch.float32, CPU, set()) is not None
