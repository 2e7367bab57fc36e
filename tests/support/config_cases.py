"""Edits of config.json, key by key, and the scores of transformers and of this project."""

import json
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from dense_model import logits_of_all
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.families import FAMILIES
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import TracedConfig

Edit = dict[str, Any]
ABSENT = "absent"
CPU = torch.device("cpu")
MODEL_TYPES = tuple(family.model_type for family in FAMILIES)
PROMPT_TOKENS = 56
MOST_PARAMETERS = 12_000_000

_BASE: Edit = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
_OF_TYPE: dict[str, Edit] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default"},
    },
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
_ROTATIONS: list[Edit] = [
    {"rope_type": "default", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"type": "linear", "rope_type": "default", "factor": 3.0},
    {"rope_type": "linear", "factor": None},
    {"rope_type": "dynamic", "factor": 4.0},
    {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "proportional", "factor": 2.0, "rope_theta": 500.0},
    {"rope_type": "none of these"},
    _LLAMA3,
    _LLAMA3 | {"original_max_position_embeddings": 32},
    _LONG,
    _LONG | {"original_max_position_embeddings": 58},
    _LONG | {"original_max_position_embeddings": 58, "attention_factor": 1.4},
    _YARN,
    {"type": "yarn", "factor": 4.0},
    _YARN | {"factor": None},
    _YARN | {"factor": 0.5},
    _YARN | {"attention_factor": 1.3},
    _YARN | {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.5},
    _YARN | {"mscale": 0.7},
    _YARN | {"truncate": False},
    _YARN | {"truncate": None},
    _YARN | {"beta_fast": 8, "beta_slow": 2},
    _YARN | {"beta_fast": None, "beta_slow": None},
    _YARN | {"beta_fast": 1, "beta_slow": 32},
    _YARN | {"original_max_position_embeddings": 3},
    _YARN | {"rope_theta": 700.0},
    _YARN | {"partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_theta": 600.0},
    {},
]
_LAYERS: list[Any] = [
    None,
    ABSENT,
    ["full_attention"] * 3,
    ["sliding_attention", "full_attention", "sliding_attention"],
    ["full_attention", "sliding_attention", "full_attention"],
    ["attention", "sliding_attention", "attention"],
    ["chunked_attention", "full_attention", "full_attention"],
    ["full_attention"] * 2,
]
_VALUES: dict[str, list[Any]] = {
    "sliding_window": [9, 1, 64],
    "use_sliding_window": [True],
    "max_window_layers": [0, 1, 2, 3],
    "layer_types": _LAYERS,
    "num_key_value_heads": [1, 4],
    "head_dim": [8, 32],
    "hidden_act": ["silu", "swish", "gelu", "gelu_new", "relu", "gelu_pytorch_tanh"],
    "rms_norm_eps": [1e-2],
    "tie_word_embeddings": [True],
    "rope_theta": [300.0],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "num_experts": [2, 8],
    "num_local_experts": [2, 8],
    "num_experts_per_tok": [1, 3],
    "norm_topk_prob": [True, False],
    "mlp_only_layers": [[1], []],
    "decoder_sparse_step": [2],
    "moe_intermediate_size": [192],
    "swiglu_limit": [0.5],
    "swiglu_alpha": [0.5],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5, 1.0],
    "max_position_embeddings": [128],
    "attention_dropout": [0.5],
    "is_causal": [False, True],
    "per_layer_config": [{"1": {"sliding_window": 9}}, {"0": {"num_key_value_heads": 4}}],
    "attention_chunk_size": [8],
    "architectures": [["OtherForCausalLM"], ["LlamaForCausalLM"]],
}
_NESTED = {"full_attention": {"rope_theta": 900.0}, "sliding_attention": {"rope_theta": 30.0}}


def edits_of(model_type: str) -> Iterator[Edit]:
    """Yield edits of one key each, and rotations at every location."""
    known = {field.name for field in fields(CONFIG_MAPPING[model_type])}
    for key in sorted(known | _VALUES.keys()):
        yield from ({key: value} for value in (ABSENT, None, *_VALUES.get(key, [])))
    windows: Edit = {"use_sliding_window": True, "sliding_window": 9}
    yield from (windows | {"layer_types": kinds} for kinds in _LAYERS)
    yield from (windows | {"max_window_layers": first} for first in (0, 1, 3, None, ABSENT))
    yield from ({"use_sliding_window": True, "sliding_window": window} for window in (None, ABSENT))
    for rope in _ROTATIONS:
        yield {"rope_parameters": rope}
        yield {"rope_parameters": ABSENT, "rope_scaling": rope}
        yield {"rope_parameters": ABSENT, "rope_scaling": rope, "rope_theta": 300.0}
    for yarn in (_YARN, _LLAMA3, _LONG):
        within = {key: value for key, value in yarn.items() if key != "original_max_position_embeddings"}
        for place in ("rope_parameters", "rope_scaling"):
            yield {"rope_parameters": ABSENT, place: within, "original_max_position_embeddings": 58}
            yield {"rope_parameters": ABSENT, place: yarn, "original_max_position_embeddings": 58}
    yield {"rope_scaling": {}, "rope_parameters": _YARN}
    yield {"rope_scaling": _LLAMA3, "rope_parameters": _YARN | {"rope_theta": 700.0}}
    yield {"rope_parameters": _NESTED}
    yield {"rope_parameters": _NESTED, "layer_types": _LAYERS[3]} | windows
    yield {"num_experts": 2, "num_local_experts": 3}


def sample(model_type: str, count: int, seed: int) -> list[Edit]:
    """Return a sample of edits; every third entry is a pair."""
    chosen, edits = random.Random(f"{model_type} {seed}"), list(edits_of(model_type))
    found = chosen.sample(edits, count)
    return [edit | chosen.choice(edits) if index % 3 == 2 else edit for index, edit in enumerate(found)]


def config_of(model_type: str, edit: Edit) -> Edit:
    """Return the config.json of a small model after an edit."""
    values = {"model_type": model_type} | _BASE | _OF_TYPE.get(model_type, {}) | edit
    return {key: value for key, value in values.items() if value is not ABSENT}


@cache
def _weights(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), {}
    for name, shape in shapes:
        values = torch.empty(shape).normal_(0.0, 0.2, generator=generator)
        found[name] = values + 1 if "norm" in name else values
    return found


def expected_scores(folder: Path, values: Edit) -> torch.Tensor | None:
    """Write a checkpoint and return transformers' scores; None if transformers cannot read or run it."""
    (folder / "config.json").write_text(json.dumps(values))
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    make: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):
                number = sum(each.numel() for each in make.from_config(config).parameters())
            if number > MOST_PARAMETERS:
                return None
            make.from_config(config).save_pretrained(folder)
            stored = load_file(folder / "model.safetensors")
            shapes = tuple((name, tuple(each.shape)) for name, each in sorted(stored.items()))
            save_file(_weights(shapes), folder / "model.safetensors", {"format": "pt"})
            (folder / "config.json").write_text(json.dumps(values))
            (folder / "generation_config.json").unlink(missing_ok=True)
            model = make.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.inference_mode():
                scores: torch.Tensor = model(_prompt(config.get_text_config().vocab_size)[None]).logits[0]
        except Exception:  # any kind: no scores to compare with
            (folder / "config.json").write_text(json.dumps(values))
            return None
    return scores


def own_scores(folder: Path, *, with_traced: bool) -> torch.Tensor | None:
    """Return this project's scores; None if it refuses the folder or leaves it to transformers' code.

    Args:
        with_traced: let transformers' code compute the remaining models, which takes seconds.
    """
    checkpoint = open_checkpoint(folder)
    try:
        config = checkpoint.config()
        is_traced = isinstance(config, TracedConfig)
        if config.max_context_tokens < PROMPT_TOKENS or (is_traced and not with_traced):
            return None
        decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
        stages = stages_of(decoder, None) if is_traced else None
    except ModelError:
        return None
    return logits_of_all(decoder, _prompt(config.vocab_size), stages=stages)


def _prompt(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, min(vocab_size, 90), (PROMPT_TOKENS,), generator=generator)
