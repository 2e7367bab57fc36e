"""Vision towers in GGUF files as `transformers` describes them: config.json, image processor, parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neo_desktop.models.gguf.family import Values
from neo_desktop.models.gguf.tower_file import TowerFile
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import ModelError

_ENDS = ".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max"
_UP, _DOWN = ".ffn_up.", ".ffn_down."


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
    """Return the rows of queries or keys where RoPE pairs i with i + head_dim / 2, as in `GGUFTensor`."""
    pairs = rows.view(own.size("attention.head_count"), -1, 2, rows.shape[-1])
    return pairs.transpose(1, 2).reshape(rows.shape)


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


class Tower:
    """The vision tower of a model in GGUF files.

    Args:
        architecture: llama.cpp's name for the model's text.

    Raise ModelError if the file is damaged, of an unknown kind, or belongs to another text.
    """

    def __init__(self, path: Path, architecture: str, hidden_size: int) -> None:
        self.path, self._architecture = path, architecture
        self._own = own = TowerFile(path)
        if own.kind not in KINDS:
            raise ModelError(
                f"{path} has a vision tower of the kind {own.kind[:40]!r}, which is not supported: known "
                f"are {', '.join(KINDS)}."
            )
        self._kind = KINDS[own.kind]
        width = own.size("projection_dim")
        if architecture not in self._kind.models or width != hidden_size:
            raise ModelError(
                f"{path} belongs to another model: its rows of images have {width} numbers for "
                f"{', '.join(self._kind.models)}, but this model is {architecture} with {hidden_size}."
            )
        if (unknown := own.unknown()) is not None:
            raise ModelError(f"{path} sets clip.vision.{unknown}, which is not supported.")

    def values(self, text: Values, vocabulary: Vocabulary) -> Values:
        """Return the values of config.json of the model with images, from its text's values.

        Raise ModelError if the tower's entries are missing or out of range, or the vocabulary lacks a token.
        """
        described = self._kind.models[self._architecture]
        text = text | {"pad_token_id": vocabulary.token_id("padding") or 0}  # stands for rows of images
        number_of = {token: number for number, token in enumerate(vocabulary.tokens)}
        for token in self._kind.tokens.values():
            if token not in number_of:
                raise ModelError(
                    f"{vocabulary.path} lacks the token {token}, which {self.path.name} needs: choose "
                    "another file of this model, or move the mmproj file away."
                )
        return {
            "model_type": described.model_type,
            "architectures": [described.architecture],
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text | {"model_type": described.text_type},
            **self._kind.values(self._own, text),
            **{key: number_of[token] for key, token in self._kind.tokens.items()},
        }

    def processor(self) -> Any:
        """Return the image processor of `transformers`."""
        import transformers  # noqa: PLC0415 - large, and rarely needed

        make: Any = getattr(transformers, f"{self._kind.processor}Pil")
        return make(**self._kind.settings(self._own))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter in float32, by its name within the base model.

        Raise ModelError if the file lacks it, or has another shape.
        """
        stored = self._stored(name)
        numbers = self._own.floats(stored)
        if f"{stored}.1" in self._own.shapes:  # a convolution over two pictures, cut into two
            numbers = torch.stack((numbers, self._own.floats(f"{stored}.1")), dim=2)
        for end, undo in self._kind.undo.items():
            if stored.endswith(end):
                numbers = self._undone(stored, numbers, undo)
        numbers = numbers.reshape(shape) if numbers.numel() == 1 else numbers  # a scalar
        if numbers.shape != shape:
            raise ModelError(
                f"{stored} in {self.path} has the shape {list(numbers.shape)}, but {list(shape)} was "
                "expected: download it again."
            )
        return numbers

    def _undone(self, stored: str, numbers: Tensor, undo: Callable[[TowerFile, Tensor], Tensor]) -> Tensor:
        try:
            return undo(self._own, numbers)
        except RuntimeError:  # its shape is another
            raise ModelError(
                f"{stored} in {self.path} has the shape {list(numbers.shape)}, which no tower of this kind "
                "has: download it again."
            ) from None

    def check_all_read(self) -> None:
        """Raise ModelError for a tensor that no parameter needed."""
        left = [name for name in self._own.unread() if not name.startswith(self._kind.idle)]
        if left:
            raise ModelError(
                f"{self.path} has {left[0]}, which is not known, so images of this file are not supported."
            )

    def _stored(self, name: str) -> str:
        """Return the name of a parameter's tensor."""
        module, _, end = name.rpartition(".")
        of_own = self._kind.named(self._own)
        if module in of_own:
            return f"{of_own[module]}.{end}"
        for ours, theirs in self._kind.renamed.items():
            name = name.replace(ours, theirs)
        stored: str | None = self._table.get_name(name, try_suffixes=_ENDS)
        if stored is None:
            raise ModelError(f"{self.path}: gguf has no name for {name}, which its vision tower needs.")
        if self._is_swapped:
            up, down = (_DOWN, _UP) if _UP in stored else (_UP, _DOWN)
            stored = stored.replace(down, up)
        return stored

    @cached_property
    def _table(self) -> Any:
        import gguf  # noqa: PLC0415 - takes a fifth of a second

        numbers = max(self._own.size("block_count"), 3)  # also those of the projector's matrices
        return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, numbers)

    @cached_property
    def _is_swapped(self) -> bool:
        """True in old files, where the two matrices of an MLP have each other's names."""
        width, wide = self._own.size("embedding_length"), self._own.size("feed_forward_length")
        return width != wide and self._own.shapes.get(f"v.blk.0{_DOWN}weight") == (wide, width)


def is_tower(name: str) -> bool:
    """Return True if a file's name is that of a vision tower."""
    return "mmproj" in name.lower()


def find_tower(model: Path, architecture: str, hidden_size: int, given: Path | None) -> Tower | str:
    """Return the vision tower of a model: the file that is given, or one beside the model.

    Returns:
        A sentence, if there is none.

    Raise ModelError if the given file cannot be used.
    """
    if given is not None:
        if not given.is_file():
            raise ModelError(f"{given} does not exist: name the model's mmproj file.")
        if not _can_see():
            raise ModelError(f"{given} needs neo-desktop[transformers]: install it, or leave mmproj out.")
        return Tower(given, architecture, hidden_size)
    if not any(architecture in kind.models for kind in KINDS.values()):
        return f"images of {architecture} GGUF files are not supported; its original folder may read them"
    reason = "images need its mmproj-*.gguf beside the model's file, or named by --mmproj"
    for path in sorted(path for path in model.parent.glob("*.gguf") if is_tower(path.name)):
        try:
            tower = Tower(path, architecture, hidden_size)
        except ModelError as error:
            reason = str(error).rstrip(".")
            continue
        return tower if _can_see() else "install neo-desktop[transformers] for images"
    return reason


def _can_see() -> bool:
    return all(find_spec(name) is not None for name in ("transformers", "PIL"))
