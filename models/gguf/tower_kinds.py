"""Kinds of vision towers in GGUF files, as `transformers` describes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import NamedTuple

from torch import Tensor

from neo_desktop.models.gguf.family import Values
from neo_desktop.models.gguf.tensors import halves_apart
from neo_desktop.models.gguf.tower_file import TowerFile
from neo_desktop.models.json_file import ModelError


class Described(NamedTuple):
    """Model types of `transformers`: with images, the class of that model, and of its text."""

    model_type: str
    architecture: str
    text_type: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of vision tower.

    Args:
        models: llama.cpp's architecture of the text -> the model.
        values: further values of config.json, from the tower and the text's values.
        tokens: keys of config.json -> texts of tokens.
        processor: class of the image processor.
        settings: its settings.
        renamed: text in names of parameters -> text in the names that gguf's table has.
        named: names of parameters that the table lacks -> names of tensors.
        undo: ends of tensors' names -> function that reverts the converter's change.
        idle: beginnings of tensors' names that images do not need.
    """

    models: Mapping[str, Described]
    values: Callable[[TowerFile, Values], Values]
    tokens: Mapping[str, str]
    processor: str
    settings: Callable[[TowerFile], Values]
    renamed: Mapping[str, str] = field(default_factory=dict)
    named: Callable[[TowerFile], Mapping[str, str]] = lambda _: {}
    undo: Mapping[str, Callable[[TowerFile, Tensor], Tensor]] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


def _sizes(own: TowerFile) -> Values:
    return {
        "hidden_size": own.size("embedding_length"),
        "intermediate_size": own.size("feed_forward_length"),
        "patch_size": own.size("patch_size"),
    }


def _layers(own: TowerFile) -> Values:
    return {
        "num_hidden_layers": own.size("block_count"),
        "num_attention_heads": own.size("attention.head_count"),
    }


def _gemma3(own: TowerFile, _: Values) -> Values:
    """Average pooling divides the patches per side by `projector.scale_factor`."""
    image_size, merged = own.size("image_size"), own.size("projector.scale_factor", 4)
    return {
        "mm_tokens_per_image": (image_size // own.size("patch_size") // merged) ** 2,
        "vision_config": {
            "model_type": "siglip_vision_model",
            **_sizes(own),
            **_layers(own),
            "image_size": image_size,
            "layer_norm_eps": own.number("attention.layer_norm_epsilon", 1e-6),
            "vision_use_head": False,
        },
    }


def _square(own: TowerFile) -> Values:
    size = own.size("image_size")
    return {**own.pixels, "size": {"height": size, "width": size}}


def _levels(own: TowerFile) -> list[int]:
    """Return the layers whose results enter the text's first layers (DeepStack)."""
    blocks = {name.split(".")[2] for name in own.shapes if name.startswith("v.deepstack.")}
    return sorted(int(block) for block in blocks if block.isdecimal())


def _qwen(own: TowerFile, text: Values) -> Values:
    positions = own.shapes.get("v.position_embd.weight", (0,))[0]
    if isqrt(positions) ** 2 != positions:
        raise ModelError(f"{own.path} has {positions} positions, which are no square: download it again.")
    levels = _levels(own)
    vision = {
        **_sizes(own),
        "depth": own.size("block_count"),
        "num_heads": own.size("attention.head_count"),
        "spatial_merge_size": own.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "num_position_embeddings": positions,
        "out_hidden_size": text["hidden_size"],
    }
    if text["model_type"].startswith("qwen3_5"):
        if levels:
            raise ModelError(f"{own.path} enters layers of the text, which Qwen3.5 does not: choose its own.")
        return {"vision_config": vision}
    return {"vision_config": vision | {"deepstack_visual_indexes": levels}}


def _qwen_settings(own: TowerFile) -> Values:
    """Return the settings; where the file has no limits of pixels, those of Qwen's folders."""
    return {
        **own.pixels,
        "patch_size": own.size("patch_size"),
        "merge_size": own.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": own.integer("image_min_pixels", 1 << 16),
            "longest_edge": own.integer("image_max_pixels", 1 << 24),
        },
    }


def _qwen_names(own: TowerFile) -> Mapping[str, str]:
    mergers = {"visual.merger.": {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}}
    for number, level in enumerate(_levels(own)):
        block = f"v.deepstack.{level}."
        mergers[f"visual.deepstack_merger_list.{number}."] = {
            "norm": f"{block}norm",
            "linear_fc1": f"{block}fc1",
            "linear_fc2": f"{block}fc2",
        }
    return {prefix + module: name for prefix, of in mergers.items() for module, name in of.items()}


def _pixtral(own: TowerFile, text: Values) -> Values:
    """The text is Ministral 3's, or Mistral's, which llama.cpp calls "llama" or "mistral3"."""
    if text["model_type"] not in ("llama", "ministral3"):
        raise ModelError(f"{own.path} has no model of transformers for this text: move the file away.")
    if "spatial_merge_size" not in own:
        raise ModelError(f"{own.path} merges no patches, as Pixtral 12B, which is not supported.")
    values: Values = {
        "multimodal_projector_bias": "mm.1.bias" in own.shapes,
        "spatial_merge_size": own.size("spatial_merge_size"),
        "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "pixtral",
            **_sizes(own),
            **_layers(own),
            "image_size": own.size("image_size"),
            "hidden_act": own.activation or "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": own.rope_theta},
        },
    }
    if text["model_type"] == "llama":
        values["text_config"] = text | {"model_type": "mistral", "sliding_window": None}
    return values


def _longest(own: TowerFile) -> Values:
    size = own.size("patch_size")
    return {**own.pixels, "size": {"longest_edge": own.size("image_size")}, "patch_size": size}


def _in_halves(own: TowerFile, rows: Tensor) -> Tensor:
    """Return the rows of queries or keys where RoPE pairs i with i + head_dim / 2."""
    return rows[halves_apart(len(rows), own.size("attention.head_count"))]


def _gemma4(own: TowerFile, text: Values) -> Values:
    """Rows of an image see each other, except in models with embeddings per layer (E2B, E4B)."""
    heads = own.size("attention.head_count")
    q_rows, kv_rows = (own.shapes.get(f"v.blk.0.attn_{part}.weight", (heads,))[0] for part in "qk")
    head_dim = max(q_rows // heads, 1)
    sight = None if text["hidden_size_per_layer_input"] else "vision"
    return {
        "audio_config": None,
        "text_config": text | {"use_bidirectional_attention": sight},
        "vision_config": {
            **_sizes(own),
            **_layers(own),
            "head_dim": head_dim,
            "num_key_value_heads": kv_rows // head_dim,
            "rms_norm_eps": own.number("attention.layer_norm_epsilon", 1e-6),
            "pooling_kernel_size": own.size("projector.scale_factor", 3),
            "position_embedding_size": own.shapes.get("v.position_embd.weight", (2, 1))[1],
            "use_clipped_linears": any(name.endswith(".input_max") for name in own.shapes),
            "standardize": "v.std_bias" in own.shapes,
        },
    }


def _patches(own: TowerFile) -> Values:
    """Return Gemma 4's settings; the towers' means and deviations have no effect there."""
    return {
        "patch_size": own.size("patch_size"),
        "pooling_kernel_size": own.size("projector.scale_factor", 3),
    }


def _qwen_model(model_type: str, name: str) -> Described:
    return Described(model_type, f"{name}ForConditionalGeneration", f"{model_type}_text")


KINDS = {
    "gemma3": Kind(
        {"gemma3": Described("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text")},
        _gemma3,
        {
            "boi_token_index": "<start_of_image>",
            "image_token_index": "<image_soft_token>",
            "eoi_token_index": "<end_of_image>",
        },
        "Gemma3ImageProcessor",
        _square,
        {"vision_tower.": "vision_tower.vision_model.", "projection_weight": "projection.weight"},
        undo={"mm.soft_emb_norm.weight": lambda _, x: x - 1},
    ),
    "qwen3vl_merger": Kind(
        {
            "qwen3vl": _qwen_model("qwen3_vl", "Qwen3VL"),
            "qwen3vlmoe": _qwen_model("qwen3_vl_moe", "Qwen3VLMoe"),
            "qwen35": _qwen_model("qwen3_5", "Qwen3_5"),
            "qwen35moe": _qwen_model("qwen3_5_moe", "Qwen3_5Moe"),
        },
        _qwen,
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        "Qwen2VLImageProcessor",
        _qwen_settings,
        named=_qwen_names,
    ),
    "pixtral": Kind(
        {
            name: Described("mistral3", "Mistral3ForConditionalGeneration", "ministral3")
            for name in ("mistral3", "llama")
        },
        _pixtral,
        {
            "image_token_index": "[IMG]",
            "image_break_token_id": "[IMG_BREAK]",
            "image_end_token_id": "[IMG_END]",
        },
        "PixtralImageProcessor",
        _longest,
        undo={".attn_q.weight": _in_halves, ".attn_k.weight": _in_halves},
        idle=("v.token_embd.img_break",),  # the text's embeddings have it
    ),
    "gemma4v": Kind(
        {"gemma4": Described("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text")},
        _gemma4,
        {
            "boi_token_id": "<|image>",
            "image_token_id": "<|image|>",
            "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
        },
        "Gemma4ImageProcessor",
        _patches,
        {
            "vision_tower.encoder.": "vision_model.model.",
            "vision_tower.": "model.vision_tower.",
            "embed_vision.": "model.embed_vision.",
            ".linear.": ".",
            "position_embedding_table": "position_embedding_table.weight",
        },
        undo={"v.patch_embd.weight": lambda _, x: x.permute(0, 2, 3, 1).flatten(1)},
        idle=("a.", "mm.a."),
    ),
}
"""Keys are llama.cpp's names, entries `projector_type`."""
