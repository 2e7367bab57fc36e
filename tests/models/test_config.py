"""config.json and generation_config.json: the supported keys, and the refused ones."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults, ModelConfig, ModelError
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.families import FAMILIES, Family
from neo_desktop.models.limits import SAMPLING_BOUNDS
from neo_desktop.models.rope import RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

CHANGE_NOTHING = {
    *("attention_dropout", "initializer_range", "pretraining_tp", "use_cache", "pad_token_id", "dtype"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),  # for training only
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "problem_type"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id"),
    *("hidden_act", "layer_types"),  # for classes whose code does not read them
}
QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32}


def read(path: Path, generation: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(BASE | settings))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_pretrained(path)


def test_both_spellings_of_transformers_mean_the_same(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    earlier = read(tmp_path, rope_theta=5e5, rope_scaling=scaling, torch_dtype="float16")
    later = read(tmp_path, rope_parameters=scaling | {"rope_theta": 5e5}, dtype="float16")
    assert earlier == later
    assert later.dtype == torch.float16
    assert later.rope.theta == 5e5
    assert len(later.rope.factors) == 8


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": False, "mscale": 0.7},
    ],
)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = scaling | {"rope_theta": 500.0, "original_max_position_embeddings": 128}
    config = read(tmp_path, rope_parameters=rope, head_dim=32)
    changes: dict[str, Any] = BASE | {"rope_parameters": rope, "head_dim": 32}
    theirs = CONFIG_MAPPING["llama"](**changes)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    torch.testing.assert_close(config.rope.inverse_frequencies(32), expected, rtol=3e-7, atol=0)
    assert config.rope.attention_factor == pytest.approx(factor)


def test_silence_means_what_it_means_to_transformers(tmp_path):
    config = read(tmp_path, num_key_value_heads=None)
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(10_000.0)
    assert config.dtype == torch.float32
    assert not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.generation == GenerationDefaults()


def test_a_config_without_architectures_is_known_by_its_model_type(tmp_path):
    assert read(tmp_path, architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


def test_generation_config_wins_over_config(tmp_path):
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    config = read(tmp_path, generation=sampling | {"eos_token_id": [5, 6]}, eos_token_id=4)
    assert config.eos_token_ids == (5, 6)
    assert config.generation == GenerationDefaults(**sampling)
    assert read(tmp_path, generation={"eos_token_id": None}, eos_token_id=4).eos_token_ids == (4,)


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, (32,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2}, (None,) * 4),
        (QWEN2_WINDOW | {"max_window_layers": 2}, (None, None, 32, 32)),
        (QWEN2_WINDOW | {"max_window_layers": 0}, (32, 32, 32, 32)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 32}, (None,) * 4),
    ],
)
def test_sliding_windows_of_each_layer(settings, windows, tmp_path):
    assert read(tmp_path, **settings).layer_windows == windows


def test_yarn_lengthens_the_context_even_where_max_position_embeddings_does_not_say_so(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = read(tmp_path, rope_scaling=scaling)
    assert config.rope.attention_factor > 1
    assert config.max_context_tokens == 2048


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*not supported.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": None, "model_type": "bloom"}, "bloom.*not supported"),
        ({"architectures": None}, "not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "quantised by 'gptq' to 3 bits.*choose",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised by 'mxfp4'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'.*float16"),
        ({"torch_dtype": "int8"}, "'int8'"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "rope type 'ntk'.*llama3.*transformers",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "'factor' = -1"),
        ({"rope_scaling": 3}, "'rope_scaling' = 3.*an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": "many"}, "'vocab_size' = 'many'.*integer"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' = 0"),
        ({"intermediate_size": 10**20}, "'intermediate_size' = 1000"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' = True"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "head_dim of 15 is odd"),
        ({"head_dim": 100}, "heads of 100 numbers.*multiples of 8 up to 576"),
        ({"head_dim": 584}, "heads of 584 numbers"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps'.*number"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings'.*true or false"),
        ({"eos_token_id": "</s>"}, "'eos_token_id'.*token id"),
        (QWEN2_WINDOW | {"layer_types": ["chunked"] * 4}, "layer_types"),
        (QWEN2_WINDOW | {"layer_types": 4}, "layer_types"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(settings, message, tmp_path):
    with pytest.raises(ModelError, match=message) as error:
        read(tmp_path, **settings)
    assert "config.json" in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match=r"config\.json is not text"):
        ModelConfig.from_pretrained(tmp_path)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere is not a folder"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json.*download"):
        ModelConfig.from_pretrained(tmp_path)


def test_a_bad_generation_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json has 'temperature' = 'hot'"):
        read(tmp_path, generation={"temperature": "hot"})


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def test_experts_are_read_as_transformers_means_them(tmp_path):
    experts = read(tmp_path, **MOE).experts
    assert experts == ExpertsConfig(8, 2, 128, (0, 1, 2, 3), normalises=False)
    for settings, layers in (
        ({"mlp_only_layers": [1, 7], "norm_topk_prob": True}, (0, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
    ):
        found = read(tmp_path, **MOE | settings).experts
        assert found is not None
        assert found.layers == layers
        assert found.normalises == ("norm_topk_prob" in settings)
    for settings in ({"num_experts": 0}, {"decoder_sparse_step": 5}, {"mlp_only_layers": [0, 1, 2, 3]}):
        assert read(tmp_path, **MOE | settings).experts is None
    config = read(tmp_path, architectures=["MixtralForCausalLM"], intermediate_size=192)
    assert config.experts == ExpertsConfig(8, 2, 192, (0, 1, 2, 3), normalises=True)
    assert (config.rms_norm_eps, config.layer_windows) == (1e-5, (None,) * 4)


def test_parameters_that_a_token_meets(tmp_path):
    config = read(tmp_path, **MOE | {"mlp_only_layers": [0]})
    of_one = 3 * 64 * 128
    assert config.num_parameters - config.active_parameters == 3 * (8 - 2) * of_one
    assert read(tmp_path).active_parameters == read(tmp_path).num_parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 1025}, "'num_experts' = 1025"),
        ({"num_experts": -1}, "'num_experts' = -1"),
        ({"num_experts": 10**20}, "'num_experts' = 1000"),
        ({"num_experts_per_tok": 9}, "8 experts, of which no token can take 9"),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' = 0"),
        ({"moe_intermediate_size": 2**30}, "'moe_intermediate_size'"),
        ({"moe_intermediate_size": None}, "lacks 'moe_intermediate_size'"),
        ({"moe_intermediate_size": 96}, "experts of 96 numbers; .* multiples of 64"),
        ({"hidden_size": 96}, "hidden states of 96 numbers"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' = 0"),
        ({"mlp_only_layers": 3}, "'mlp_only_layers'"),
        ({"mlp_only_layers": [True]}, "'mlp_only_layers'"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' = 1"),
    ],
)
def test_experts_that_cannot_be_are_refused(tmp_path, settings, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **MOE | settings)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
def test_each_key_of_a_class_is_known_with_its_default(family: Family) -> None:
    """A new key of transformers fails here, until it is supported or known to change nothing."""
    config_class: Any = CONFIG_MAPPING[family.model_type]
    silent = config_class()
    read = {field.name: field.default for field in fields(config_class)} | {"layer_types": None}
    assert set(read) <= family.defaults.keys() | CHANGE_NOTHING
    theta = {"rope_theta": config_class.default_theta}
    rope = None if silent.rope_parameters == {"rope_type": "default"} | theta else silent.rope_parameters
    assert theta | (family.defaults["rope_parameters"] or {}) == theta | (rope or {})
    others = {key: value for key, value in family.defaults.items() if not key.startswith("rope_")}
    assert others == {key: read[key] for key in others}
    assert family.defaults["rope_theta"] == config_class.default_theta


def test_recommendations_that_no_request_may_have_are_left_out_and_named(tmp_path):
    generation = {"repetition_penalty": 0, "top_p": 1.5, "temperature": 0.7, "no_repeat_ngram_size": 3}
    found = read(tmp_path, generation | {"suppress_tokens": [], "typical_p": 1.0}).generation
    assert found == GenerationDefaults(
        temperature=0.7,
        ignored=("no_repeat_ngram_size of 3", "top_p of 1.5", "repetition_penalty of 0"),
    )


@given(
    st.dictionaries(
        st.sampled_from(sorted(SAMPLING_BOUNDS)), st.floats(0, 1e3) | st.sampled_from([0, 1e-3, 0.01, 1, 100])
    )
)
def test_what_a_model_recommends_is_what_a_request_may_ask_for(values: dict[str, float]) -> None:
    found = GenerationDefaults.within_bounds(values)
    for name, value in values.items():
        if getattr(found, name) is None:
            with pytest.raises(SettingError):
                SamplingParams(**{name: value})
        else:
            SamplingParams(**{name: value})
