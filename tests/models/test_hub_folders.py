"""Folders as on the hub, compared with transformers' result for the same folder."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import transformers_greedy
from dense_model import logits_of_all
from safetensors.torch import load_file, save_file
from torch import Tensor
from traced_models import EXPERTS, LATENT, save
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.olmo2 import modeling_olmo2

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model, stages_of
from neo_desktop.models.traced import fused, patterns, stages
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.traced.experts import _gating
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 300, (20,), generator=torch.Generator().manual_seed(1))
Tensors = dict[str, Tensor]
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", TIED),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"num_experts": 8, "head_dim": 16}),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "gpt-neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied": ("olmo2", TIED),
    "deepseek-v3": ("deepseek_v3", EXPERTS | LATENT | {"n_group": 4, "topk_group": 2}),
    "sarvam-moe": (
        "sarvam_moe",
        EXPERTS
        | {"num_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, saved = tmp_path_factory.mktemp("hub"), set[str]()

    def folder(name: str) -> Path:
        if name not in saved:
            saved.add(name)
            save(root / name, *FAMILIES[name])
        return root / name

    return folder


def changed(path: Path, to: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a folder, with changed tensors."""
    shutil.copytree(path, to)
    tensors = change(load_file(path / "model.safetensors"))
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, to / "model.safetensors")
    return to


def scores(path: Path, form: Any = None) -> Tensor:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    is_traced = isinstance(config, TracedConfig)
    return logits_of_all(decoder, TOKENS, stages=stages_of(decoder, None) if is_traced else None)


def of_transformers(path: Path) -> Tensor:
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(TOKENS[None]).logits[0]
    return found


def check_scores(path: Path) -> None:
    found, expected = scores(path), of_transformers(path)
    assert torch.linalg.vector_norm(found - expected) <= 1e-4 * torch.linalg.vector_norm(expected)


def check_weights(path: Path) -> None:
    """Compare every weight with the parameter of that name, or with the expert's part of a stacked one."""
    checkpoint = open_checkpoint(path)
    decoder = load_model(checkpoint, checkpoint.config(), dtype=torch.float32, device=CPU)
    make: Any = AutoModelForCausalLM
    expected = make.from_pretrained(path, dtype=torch.float32).state_dict()
    for weight in named_weights(decoder):
        value = expected.get(weight.name)
        of_heads = re.fullmatch(r"(.+)\.latent_(keys|values)", weight.name)
        if of_heads is not None:
            heads = expected[of_heads[1]].view(LATENT["num_key_value_heads"], -1, LATENT["kv_lora_rank"])
            keys, values = heads.split((LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]), dim=1)
            value = (keys.transpose(1, 2) if of_heads[2] == "keys" else values).flatten(0, 1)
        elif value is None:
            written = re.fullmatch(r"(.+)\.(\d+)\.(gate|up|down)_proj\.weight", weight.name)
            traced = re.fullmatch(r"(.+)\.\w+_proj\[(\d+)\]\.(gate|up|down)", weight.name)
            module, expert, kind = (written or traced).groups()
            stack = expected[f"{module}.{'down' if kind == 'down' else 'gate_up'}_proj"][int(expert)]
            value = stack if kind == "down" else stack.chunk(2)[kind == "up"]
        assert torch.equal(weight.dense(), value), weight.name


def _own_head(tensors: Tensors) -> Tensors:
    embedding = next(each for name, each in tensors.items() if name.split(".")[-2] in ("embed_tokens", "wte"))
    head = embedding.clone()
    head[-1, -1] += 1  # a single number
    head[3] *= -2
    return tensors | {"lm_head.weight": head}


def _same_head(tensors: Tensors) -> Tensors:
    embedding = next(each for name, each in tensors.items() if name.split(".")[-2] in ("embed_tokens", "wte"))
    return tensors | {"lm_head.weight": embedding}


def _head_alone(tensors: Tensors) -> Tensors:
    tensors = _same_head(tensors)
    return {
        name: each for name, each in tensors.items() if name.split(".")[-2] not in ("embed_tokens", "wte")
    }


def _without_prefix(tensors: Tensors) -> Tensors:
    return {
        name if name.startswith(("lm_head", "embed_out")) else name.split(".", 1)[1]: each
        for name, each in tensors.items()
    }


def _with_prefix(tensors: Tensors) -> Tensors:
    prefix = next(name for name in tensors if not name.startswith(("lm_head", "embed_out"))).split(".")[0]
    return {
        f"{prefix}.{name}" if name.startswith(("lm_head", "embed_out")) else name: each
        for name, each in tensors.items()
    }


def _buffers(tensors: Tensors) -> Tensors:
    """Add the buffers that old code saved, in its dtypes."""
    mask = torch.ones(1, 1, 256, 256).tril()
    found = dict(tensors)
    for layer in {
        name[: name.index(".0.") + 3] for name in tensors if ".0." in name and "expert" not in name
    }:
        found |= {
            f"{layer}{module}.{name}": value.clone()
            for module in ("attn", "attention", "self_attn")
            for name, value in {
                "bias": mask.to(torch.uint8) if module == "attention" else mask.bool(),
                "masked_bias": torch.tensor(-1e9),
                "rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64),
            }.items()
        }
    return found | {"model.embeddings.position_ids": torch.arange(256)[None]}


def _predicting(tensors: Tensors) -> Tensors:
    """Add DeepSeek's prediction layer behind the last layer, and a prediction module like other models'."""
    last = {
        name.replace(".2.", ".3.", 1): each
        for name, each in tensors.items()
        if name.startswith("model.layers.2.")
    }
    others = {
        f"model.layers.3.{name}": torch.ones(64)
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    module = {"mtp.layers.0.input_layernorm.weight": torch.ones(64), "mtp.fc.weight": torch.ones(64, 128)}
    return tensors | last | others | module | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}


CHANGES: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "own head": (_own_head, ("llama-tied", "olmo2-tied", "gpt2")),
    "same head": (_same_head, ("llama-tied", "gpt2")),
    "head alone": (_head_alone, ("llama-tied", "olmo2-tied")),
    "without prefix": (
        _without_prefix,
        ("llama", "llama-tied", "qwen3-moe", "gpt2", "gpt-neox", "deepseek-v3"),
    ),
    "with prefix": (_with_prefix, ("llama", "olmo2")),
    "buffers": (_buffers, ("llama", "gpt2", "gpt-neox", "olmo2")),
    "more predictions": (_predicting, ("deepseek-v3", "qwen3-moe")),
    "as saved": (lambda tensors: tensors, ("sarvam-moe",)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("change", "family"), [(change, family) for change, (_, of_it) in CHANGES.items() for family in of_it]
)
def test_weights_are_those_of_transformers(
    change: str, family: str, folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(folders(family), tmp_path / "changed", CHANGES[change][0])
    with caplog.at_level(logging.WARNING, "neo_desktop"):
        check_weights(path)
    assert summarize(path).reason is None
    said = [record.message for record in caplog.records if record.name.endswith("registry")]
    if change == "own head":
        assert ["other numbers" in each for each in said] == [True]
    else:
        assert said == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama-tied", "olmo2-tied"])
def test_scores_come_from_the_head_in_the_file(
    family: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    check_scores(changed(folders(family), tmp_path / "changed", _own_head))


def test_rotations_of_rows_before_heads_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = modeling_olmo2.apply_rotary_pos_emb

    def rows_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        turned = usual(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return [each.transpose(1, 2) for each in turned]

    monkeypatch.setattr(modeling_olmo2, "apply_rotary_pos_emb", rows_first)
    check_scores(save(tmp_path / "rows-first", "olmo2", {"num_hidden_layers": 2}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["patterns", "lowered", "run"])
def test_an_operator_that_fails_is_not_used(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise IndexError

    path = save(tmp_path / "model", "olmo2", {"num_hidden_layers": 1})
    if part == "patterns":
        monkeypatch.setattr(patterns.Fusion, "run", fails)
    elif part == "lowered":
        monkeypatch.setattr(stages, "lowered", fails)
    else:
        monkeypatch.setattr(fused.Gate, "forward", fails)
    check_scores(path)


@pytest.mark.parametrize("limit", [0.5, 1000.0])
@pytest.mark.parametrize("which", ["gate", "up", "both"])
def test_gates_with_a_limit_are_not_taken_for_silu(limit: float, which: str) -> None:
    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate = gate if which == "up" else gate.clamp(max=limit)
        return torch.nn.functional.silu(gate) * (up if which == "gate" else up.clamp(-limit, limit))

    with pytest.raises(CannotCutError, match="neither SiLU nor GELU"):
        _gating(apply_gate)


def test_gates_with_silu_and_gelu_by_tanh_are_known() -> None:
    def gates(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda both: function(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]

    assert _gating(gates(torch.nn.functional.silu)) == "silu"
    assert _gating(gates(lambda x: torch.nn.functional.gelu(x, approximate="tanh"))) == "gelu"
    with pytest.raises(CannotCutError, match="neither SiLU nor GELU"):
        _gating(gates(torch.nn.functional.gelu))


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0 + 0.5 * number for number in range(8)],
    "original_max_position_embeddings": 64,
}
BY_ITS_CODE: dict[str, tuple[str, dict[str, Any], int]] = {  # and the served context length
    "clipped": ("olmo", {"clip_qkv": 0.5, "num_hidden_layers": 2}, 256),
    "longrope": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "num_hidden_layers": 2},
        64,
    ),
    "a scale for each layer": ("gpt2", {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True}, 256),
    "a tied head with a bias": ("phi", TIED, 256),
    "dynamic": (
        "olmo2",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
            "num_hidden_layers": 2,
        },
        256,
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BY_ITS_CODE)
def test_more_is_computed_by_the_code_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, changes, context = BY_ITS_CODE[name]
    path = save(tmp_path / "model", model_type, changes)
    with caplog.at_level(logging.WARNING, "neo_desktop"):
        check_scores(path)
    assert ("RoPE would change" in caplog.text) == (name in ("longrope", "dynamic"))
    if model_type != "gpt2":
        assert open_checkpoint(path).config().max_context_tokens == context


def test_longrope_may_have_the_whole_context_with_long_factors(tmp_path: Path) -> None:
    path = save(tmp_path / "model", *BY_ITS_CODE["longrope"][:2])
    prompts = [torch.arange(3, 3 + length).tolist() for length in (65, 100)]  # beyond the original context
    options = EngineOptions(model=str(path), device="cpu", cpu_cache_tokens=512, longrope="long")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with Engine.from_options(options) as engine:
        assert engine.max_context_tokens == 256
        outputs = engine.generate(prompts, [params] * len(prompts))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.token_ids) == transformers_greedy(path, prompt, 12)


MLX = {"group_size": 64, "bits": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {}, "has Mamba layers .*, which .* yet: a GGUF"),
    "hybrid": ("jamba", {}, "has Mamba layers"),
    "rwkv": ("rwkv", {}, "has RWKV's recurrent layers"),
    "alibi": ("bloom", {}, "has ALiBi"),
    "falcon's alibi": ("falcon", {"alibi": True, "num_attention_heads": 4}, "has ALiBi"),
    "lightning": ("minimax", {}, "has lightning attention layers"),
    "several streams": ("gemma3n_text", {"num_kv_shared_layers": 0}, "has AltUp"),
    "images": ("qwen2_5_vl", {}, r"Qwen2_5_VL\w*, which reads images and text, .* --backend llamacpp"),
    "an encoder": ("t5", {}, "has an encoder"),
    "mlx": ("llama", {"quantization_config": MLX}, "quantised by MLX"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_a_model_has(name: str, tmp_path: Path) -> None:
    model_type, changes, said = REFUSED[name]
    sizes = {"hidden_size": 64, "num_hidden_layers": 3} if model_type not in ("qwen2_5_vl", "t5") else {}
    config = CONFIG_MAPPING[model_type](**(sizes | changes)).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(ModelError, match=said) as error:
        open_checkpoint(tmp_path).config()
    assert "<class" not in str(error.value)
    assert "told apart" not in str(error.value)


@pytest.mark.parametrize("is_beside", [True, False])
def test_adapters_are_named(is_beside: bool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    if is_beside:
        shutil.copytree(folders("llama"), path)
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/a-model"}))
    with pytest.raises(ModelError, match=r"adapter of PEFT for someone/a-model.* merge"):
        open_checkpoint(path).config()
    assert "adapter of PEFT" in str(summarize(path).reason)


@pytest.mark.parametrize("name", ["layers.0.self_attn.bias", "layers.7.mlp.up_proj.weight", "extra.weight"])
def test_what_is_no_weight_of_a_model_is_an_error(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    path = changed(folders("llama"), tmp_path / "changed", lambda tensors: tensors | {name: torch.ones(64)})
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=rf"does not describe, {re.escape(name)}"):
        check_model(checkpoint, checkpoint.config())
