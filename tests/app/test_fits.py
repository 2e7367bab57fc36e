"""Predicted memory and speed of models; the engine takes what was predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_models import save_pair
from checkpoints import save_checkpoint
from predicting_models import save_predicting
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop import Engine
from neo_desktop.app.commands.models_command import fit_facts
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.checkpoint_summary import LocalModel, summarize
from neo_desktop.app.shelf.fits import Fit, Fitting
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.speed import MachineFigures, cpu_figures, find_figures, predict
from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.mtp import Beside, plan_beside
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.speculate.kept_states import most_bytes
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form
from neo_desktop.models.traced.config import read_traced

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_tables_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("saved") / "tiny-llama", "llama")


SMALL = {"gpu_memory_gib": 0.01, "cpu_memory_gib": 0.02}


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer of multi-token prediction."""
    folder = tmp_path_factory.mktemp("saved") / "predicting"
    save_predicting(folder, "glm4-moe")
    return folder


@pytest.mark.parametrize(
    ("policy", "dtype", "drafts"),
    [
        ("auto", "float32", "no"),
        ("neo", "bfloat16", "model"),
        ("gpu-only", "auto", "no"),
        ("neo", "float32", "layer"),
        pytest.param("neo", "float32", "assistant", marks=pytest.mark.sample(0)),
    ],
)
def test_the_engine_takes_what_was_predicted(
    checkpoint: Path, predicting: Path, policy: str, dtype: str, drafts: str, tmp_path: Path
) -> None:
    options = EngineOptions(dtype=dtype, device="cpu", policy=policy, **SMALL)  # type: ignore[arg-type]
    path = {"layer": predicting, "assistant": tmp_path / "model"}.get(drafts, checkpoint)
    if drafts == "assistant":
        options = replace(options, draft_model=save_pair(tmp_path).draft_path)
    if drafts == "model":
        options = replace(options, draft_model=checkpoint)
    model, loader = summarize(path), ModelLoader(Catalogue(model=str(path)), options)
    assert model.config is not None
    assert (model.layer is not None) == (drafts == "layer")
    found = loader.fit(model.config, model.form, layer=model.layer)
    with Engine.from_options(replace(options, model=model.path)) as engine:
        stats = engine.stats()
        pools = {place: pool.num_blocks * stats.block_size for place, pool in stats.pools.items()}
        assert stats.dtype == found.dtype
    assert found.gpu_tokens == pools[KVTier.DEVICE]
    assert found.cpu_tokens == pools.get(KVTier.HOST, 0)
    assert found.gpu_tokens > 0


def test_a_layer_of_multi_token_prediction_takes_memory_and_never_many_weights(predicting: Path) -> None:
    """A plan is made of the model alone and of the model beside the layer."""
    layer, options, free = summarize(predicting).layer, EngineOptions(), FreeMemory(4 * GIB, 2 * GIB)
    assert layer is not None

    def beside(alone: int, more: int) -> Beside:
        def plan(_: EngineOptions, left: FreeMemory) -> WeightPlan | None:
            on_host = alone + more * (left != free)
            return WeightPlan({}, 0, on_host) if on_host else None

        return plan_beside(layer, torch.float32, torch.device("cuda"), options, free, plan)

    found = beside(0, 0)
    assert found.free.gpu_bytes is not None
    assert 2 * GIB - found.free.gpu_bytes > found.nbytes > 0
    assert 4 * GIB - found.free.host_bytes == most_bytes(16, layer.config.hidden_size)
    assert beside(100, 15).plan is not None
    for alone, more in ((0, 1), (100, 40)):
        with pytest.raises(MemoryError, match="more of the model's weights would be in host memory"):
            beside(alone, more)


def of_gpu(
    gpu_gib: float,
    host_gib: float,
    model: str | ModelConfig = "llama-3.1-8b",
    policy: str = "auto",
    known: MachineFigures | str = "nothing is known",
    draft: LocalModel | None = None,
    gpu_cache_tokens: int | None = None,
) -> Fit:
    """Return the fit of a model on a computer with this GPU and host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neo_desktop.app.shelf.fits.choose_device", lambda _: torch.device("cuda"))
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
        free = FreeMemory(int(host_gib * GIB), int(gpu_gib * GIB))
        options = EngineOptions(
            policy=policy, draft_model=draft and draft.path, gpu_cache_tokens=gpu_cache_tokens
        )
        config = shape(model) if isinstance(model, str) else model
        return Fitting(config, options, free, known, draft=draft).fit()


def test_experts_of_traced_models_need_not_fit_the_gpu(tmp_path: Path) -> None:
    make: Any = CONFIG_MAPPING["qwen3_5_moe_text"]
    make(num_hidden_layers=4, dtype="bfloat16").save_pretrained(tmp_path)
    config = read_traced(tmp_path)
    found = of_gpu(6, 64, config)
    assert found.reason is None
    assert found.host_weights_bytes > found.weights_bytes // 3
    assert found.chats
    assert of_gpu(40, 64, config).host_weights_bytes == 0


def test_as_many_chats_of_a_hybrid_fit_as_their_states_have_slots() -> None:
    found = of_gpu(24, 96, TRACED_SHAPES["nemotron-3-nano"])
    assert 1 < found.chats < (found.gpu_tokens + found.cpu_tokens) // 4096 // 10


def test_offloading_brings_chats_that_the_gpu_alone_has_no_room_for() -> None:
    found = of_gpu(20, 64)
    assert found.reason is None
    assert not found.is_imitated
    assert found.weights_bytes == shape("llama-3.1-8b").weight_bytes(torch.bfloat16)
    assert 0 < found.gpu_chats < 10 < found.chats
    assert found.gpu_chats == found.gpu_tokens // 4096
    assert found.kv_bytes_per_1000_tokens == 131_072_000
    alone = of_gpu(20, 64, policy="gpu-only")
    assert alone.chats == alone.gpu_chats
    assert 0 <= alone.gpu_chats - found.gpu_chats <= 1  # streamed KV has a prefetch buffer


def test_a_draft_model_takes_gpu_memory_only_if_the_model_stays_there_whole() -> None:
    draft = LocalModel(Path("draft"), 0, config=shape("llama-3.2-1b"))
    large, small = ((of_gpu(gib, 64), of_gpu(gib, 64, draft=draft)) for gib in (20, 17))
    assert large[1].host_weights_bytes == small[1].host_weights_bytes == 0
    taken = (large[0].gpu_tokens - large[1].gpu_tokens) * large[0].kv_bytes_per_1000_tokens / 1000
    assert shape("llama-3.2-1b").weight_bytes(torch.bfloat16) < taken < 3.5e9
    assert large[1].cpu_tokens >= large[0].cpu_tokens
    assert small[1].gpu_tokens == small[0].gpu_tokens
    assert small[1].cpu_tokens < small[0].cpu_tokens
    assert "the draft model does not fit" in (of_gpu(17, 1, draft=draft).reason or "")


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
    assert found.chats > 0
    assert found.speed is not None
    rows = dict(fit_facts(found))
    assert "in host memory, computed by CPU and GPU together" in rows["Weights"]
    with_room = of_gpu(24, 64, known=known)
    assert with_room.host_weights_bytes == 0
    assert with_room.speed is not None
    # CPU and bus together read the weights in host memory; the GPU reads faster.
    assert 41e9 / found.host_weights_bytes * 0.7 < found.speed.one_chat_tokens_per_s
    assert found.speed.one_chat_tokens_per_s < min(
        41e9 / found.host_weights_bytes, with_room.speed.one_chat_tokens_per_s
    )


@pytest.mark.parametrize("policy", ["auto", "neo", "gpu-only", "apex", "pie"])
def test_a_plan_for_weights_leaves_its_room_for_kv(policy: str) -> None:
    gpu = get_gpu("rtx-3060-8gb")
    known = MachineFigures(gpu, get_host(gpu.host), True, "a datasheet")
    assert of_gpu(8, 64, known=known, policy=policy).gpu_tokens >= 4096
    for tokens in (4096, 16384):
        found = of_gpu(8, 64, known=known, policy=policy, gpu_cache_tokens=tokens)
        assert found.reason is None
        assert found.host_weights_bytes > 0
        assert found.gpu_tokens == tokens


def figures(read: float) -> MachineFigures:
    return cpu_figures(read * 1e9, 500e9)


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b", "llama-3.1-8b"])
def test_predictions_follow_the_memory_and_never_prefer_a_slower_batch(name: str) -> None:
    config, chats = shape(name), tuple(zip(MEASURED_TIERS, (4, 9), strict=True))
    slow, fast = (predict(figures(read), config, torch.bfloat16, chats, 4096) for read in (20, 80))
    assert slow.one_chat_tokens_per_s < fast.one_chat_tokens_per_s
    for each in (slow, fast):
        assert each.best_tokens_per_s >= each.one_chat_tokens_per_s
        assert 1 <= each.best_chats <= 13
        assert each.best_tokens_per_s == pytest.approx(each.best_chats / each.best_ms_per_token * 1e3)
        assert "a quick look at this computer" in each.assumption
    if name == "llama-3.1-8b":  # bound by reading the weights
        assert slow.one_chat_tokens_per_s < 20e9 / config.weight_bytes(torch.bfloat16)


def test_quantised_weights_are_reckoned_and_predicted_by_their_true_bytes() -> None:
    config = shape("llama-3.1-8b")

    def of(form: WeightFormat) -> Fit:
        free = FreeMemory(64 * GIB, None)
        return Fitting(config, EngineOptions(device="cpu", dtype="bfloat16"), free, figures(20), form).fit()

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
    ("name", "preset"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 5090 D", None),  # not the same card as the 5090
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
