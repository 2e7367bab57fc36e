"""Configurations of traced models: context lengths, end tokens, heads and other key names."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_cases import config_of
from traced_models import SIZES, save
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model
from neo_desktop.models.traced import config as traced_config
from neo_desktop.models.traced.config import TracedConfig, read_config

CONTEXTS = {"gpt2": "n_positions", "codegen": "n_positions", "gpt_bigcode": "n_positions", "biogpt": None}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("model_type", CONTEXTS)
def test_the_context_is_that_of_transformers_under_any_name(model_type: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8, "n_inner": 96}
    path = save(tmp_path, model_type, sizes if CONTEXTS[model_type] else {})
    written = json.loads((path / "config.json").read_text())
    assert written[CONTEXTS[model_type] or "max_position_embeddings"] == 256
    config = read_config(path)
    assert (config.max_context_tokens, config.bos_token_id, config.eos_token_ids) == (256, 1, (2,))


def test_a_context_shorter_than_what_is_measured_is_kept(tmp_path: Path) -> None:
    """Learned positions end at the context length; only longer prompts are refused."""
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "max_position_embeddings": 96}
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    with Engine.from_pretrained(save(tmp_path, "gpt2", sizes), device="cpu") as engine:
        with pytest.raises(ContextLengthError, match=r"96 tokens.*200 tokens"):
            engine.generate([[6] * 200], greedy)
        assert len(engine.generate([[5] * 90], greedy)[0].token_ids) == 3


def test_the_part_about_text_says_the_context(tmp_path: Path) -> None:
    text = {key: value for key, value in SIZES.items() if not key.endswith("_id")}
    text |= {"head_dim": 16, "max_position_embeddings": 777, "sliding_window": 9}
    images = {"image_token_index": 7, "boi_token_index": 8, "eoi_token_index": 9, "mm_tokens_per_image": 4}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=VISION, **images))
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.max_context_tokens, config.bos_token_id, config.eos_token_ids) == (777, 2, (1,))


@pytest.mark.parametrize("name", ["InternLM3ForCausalLM", "LlamaForCausalLM"])
def test_the_type_of_a_model_counts_and_not_the_name_of_its_class(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, "internlm3", {})
    _edit(path, architectures=[name])
    config = read_config(path)
    assert isinstance(config, TracedConfig)
    check_model(open_checkpoint(path), config)
    _edit(path, architectures=["InternLM3ForSequenceClassification"])
    with pytest.raises(ModelError, match=r"SequenceClassification.*another head"):
        read_config(path)


def test_heads_without_a_kernel_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, "olmo2", {"hidden_size": 584, "num_attention_heads": 1, "num_key_value_heads": 1})
    with pytest.raises(ModelError, match="heads of 584 numbers are not supported"):
        read_config(path)


def test_without_transformers_a_refusal_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", {"hidden_act": "gelu"})))
    monkeypatch.setattr(traced_config, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"hidden_act 'gelu'.*pip install 'neo-desktop\[transformers\]'"):
        read_config(tmp_path)


def _edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
