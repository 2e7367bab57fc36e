"""GGUF files of models with recurrent layers: the logits of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import transformers_greedy
from dense_model import logits_of_all
from gguf_hybrids import LARGE, VOCAB_SIZE, WRITTEN, write_hybrid

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.registry import check_model, load_model, stages_of
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
NO_MATMUL = ("kv_b_proj.weight",)
MTP = {  # a layer of multi-token prediction, as the converter writes it
    "blk.4.nextn.eh_proj.weight": torch.ones(64, 128),
    "blk.4.nextn.enorm.weight": torch.ones(64),
    "blk.4.nextn.shared_head_norm.weight": torch.ones(64),
    "blk.4.attn_norm.weight": torch.ones(64),
    "blk.4.ffn_gate_exps.weight": torch.ones(2, 64, 64),
}


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))


def expected_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(token_ids[None], use_cache=False).logits[0]
    return found


def meaning_of(path: Path) -> str | None:
    """Return the config.json that a file stands for."""
    config = open_checkpoint(path).config()
    assert isinstance(config, TracedConfig)
    assert config.source.config_json is not None
    return config.source.config_json


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    decoder = load_model(checkpoint, checkpoint.config(), dtype=torch.float32, device=CPU)
    return {weight.name: weight.dense() for weight in named_weights(decoder)}


def assert_same_weights(path: Path, usual: Path) -> None:
    found, expected = weights_of(path), weights_of(usual)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], msg=name)


def logits(path: Path, token_ids: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config) if keep else DENSE
    decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    return logits_of_all(decoder, token_ids, stages=stages_of(decoder, None))


def assert_close(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    assert torch.linalg.vector_norm(found - expected) <= share * torch.linalg.vector_norm(expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", WRITTEN)
def test_logits_and_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path, model = write_hybrid(tmp_path, family)
    expected = expected_logits(model, tokens(40))
    assert expected.std() > 0.1
    assert_close(logits(path, tokens(40)), expected, 1e-4)
    assert summarize(path).is_by_transformers
    config = open_checkpoint(path).config()
    assert config.num_parameters >= sum(weight.numel() for weight in model.parameters())
    prompt = tokens(40).tolist()
    options = EngineOptions(
        model=str(path),
        device="cpu",
        dtype="float32",
        cpu_cache_tokens=256,
        max_batch_tokens=16,
        max_batch_requests=4,
    )
    with Engine.from_options(options) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (output,) = engine.generate([prompt], params)
    assert list(output.token_ids) == transformers_greedy(tmp_path, prompt, 8)


@pytest.mark.sample(0)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", WRITTEN)
def test_matrices_stay_as_they_are_stored(family: str, type_name: str, tmp_path: Path) -> None:
    """Floats beside quantised matrices with the same input do not change that."""
    floats = dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_ba"), "F32")
    path, model = write_hybrid(tmp_path, family, type_name, type_names=floats, sizes=LARGE)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    weights = check_model(checkpoint, config)
    form = stored_form(weights, config)
    assert form.kept_types == {type_name}
    assert form.without_kernel == ()
    matrices = config.own_matrices
    quantised = {name for name, stored in weights.tensors.items() if stored.is_quantised}
    # Attention to latents uses its weight per head: no matmul has it.
    parameters = {name for name in weights.tensors if name.endswith(NO_MATMUL)}
    assert quantised - {name for fused in matrices for name in fused.weights} == parameters
    found, expected = logits(path, tokens(20), keep=True), expected_logits(model, tokens(20))
    if any(fused.experts for fused in matrices):
        # Matmul inputs are rounded to 8 bits: the experts of a few tokens change, and with them the logits.
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() <= 0.2
        assert errors.quantile(0.8) <= 0.5
    else:
        assert_close(found, expected, 0.2)


def test_a_matrix_of_two_types_is_dequantised(tmp_path: Path) -> None:
    path, _ = write_hybrid(tmp_path, "granite-h", "Q8_0", type_names={"ffn_up": "Q4_0"}, sizes=LARGE)
    assert "Q4_0 and Q8_0" in summarize(path).form.without_kernel


def test_qwen3_next_files_may_have_the_joined_matrix(tmp_path: Path) -> None:
    path, _ = write_hybrid(tmp_path, "qwen3-next", is_old=True)
    assert_same_weights(path, write_hybrid(tmp_path / "usual", "qwen3-next")[0])


def test_deepseek_files_may_have_one_matrix_of_keys_and_values(tmp_path: Path) -> None:
    of_latents: dict[str, Any] = dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"))
    sizes = {"attention.key_length": 24, "attention.value_length": 16, "attention.head_count_kv": 4}
    path, _ = write_hybrid(tmp_path, "deepseek-v3", is_old=True, metadata=of_latents | sizes)
    assert_same_weights(path, write_hybrid(tmp_path / "usual", "deepseek-v3")[0])


@pytest.mark.parametrize("keeps_both", [True, False])
def test_nemotron_files_have_one_of_two_epsilons(keeps_both: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention.layer_norm_rms_epsilon": 1e-5}
    changes |= {} if keeps_both else {"attention.layer_norm_epsilon": None}
    usual, _ = write_hybrid(tmp_path / "usual", "nemotron-h moe")
    path, _ = write_hybrid(tmp_path, "nemotron-h moe", metadata=changes)
    assert meaning_of(path) == meaning_of(usual)


def test_layers_follow_from_the_interval_in_older_files(tmp_path: Path) -> None:
    changes = {"attention.recurrent_layers": None, "full_attention_interval": 3}
    usual, _ = write_hybrid(tmp_path / "usual", "qwen3.5")
    path, _ = write_hybrid(tmp_path, "qwen3.5", metadata=changes)
    assert meaning_of(path) == meaning_of(usual)


def test_layers_of_multi_token_prediction_are_skipped(tmp_path: Path) -> None:
    changes = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True, True, False, True, False],
    }
    path, _ = write_hybrid(tmp_path, "qwen3.5", metadata=changes, tensors=MTP)
    checkpoint = open_checkpoint(path)
    assert len(check_model(checkpoint, checkpoint.config()).predicting) == len(MTP)
    usual, _ = write_hybrid(tmp_path / "usual", "qwen3.5")
    assert_same_weights(path, usual)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3.5", {"rope.scaling.type": "yarn"}, r"sets rope.scaling.type.*neo-desktop\[llamacpp\]"),
        ("qwen3.5", {"ssm.group_count": 3}, "cannot"),
        ("lfm2", {"attention.sliding_window": 8}, "sets attention.sliding_window"),
        ("lfm2 moe", {"expert_gating_func": 1}, "expert_gating_func"),
        ("nemotron-h", {"moe_latent_size": 8}, "sets moe_latent_size"),
        ("granite-h", {"attention.head_count_kv": [0, 2, 1, 0]}, "different attention.head_count_kv"),
    ],
)
def test_what_is_not_known_is_left_to_llama_cpp(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write_hybrid(tmp_path, family, metadata=changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path).config()
    assert summarize(path).needs_llamacpp


def test_sizes_of_recurrent_heads_must_fit(tmp_path: Path) -> None:
    path, _ = write_hybrid(tmp_path, "falcon-h1", metadata={"ssm.inner_size": 127})
    with pytest.raises(ModelError, match=r"ssm\.inner_size of 127 for 8 heads"):
        open_checkpoint(path).config()
