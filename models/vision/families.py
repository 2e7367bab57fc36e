"""The families of models that read images: parts of their code, and the text that stands for an image."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.json_file import JsonFile
from neo_desktop.models.marks import ChatText
from neo_desktop.models.vision.prompt import Grid, Sight


@dataclass(frozen=True, slots=True)
class Words:
    """Texts of a model's control tokens.

    Args:
        settings: processor_config.json, empty if the folder has none.
    """

    of: Callable[[int], str]
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, of: Callable[[int], str]) -> "Words":
        file = folder / "processor_config.json"
        return cls(of, JsonFile.read(file).values if file.exists() else {})


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of models that read images.

    Args:
        parts: modules of the base model that compute embeddings, and how each is made from the configuration.
        inputs: results of the image processor that the code takes.
        settings: of the image processor, where the model decides.
        mark: the text that chat templates write for an image.
        text: of an image's rows, from the processor's results.
        sight: layers in which rows see later rows of their image.
        grid: of an image's rows, from the processor's results; None: rows have one position.
    """

    model_type: str
    parts: Mapping[str, Callable[[Any, type], Any]]
    inputs: tuple[str, ...]
    settings: Callable[[Any], dict[str, Any]]
    mark: Callable[[Any, Words], str]
    text: Callable[[Any, Words, Mapping[str, Tensor]], ChatText]
    sight: Callable[[Any], Sight] = lambda config: Sight.CAUSAL
    grid: Callable[[Any, Mapping[str, Tensor]], Grid | None] = lambda config, inputs: None


def _tower(config: Any, _: type) -> Any:
    from transformers import AutoModel  # noqa: PLC0415 - large, and rarely needed

    make: Any = AutoModel
    return make.from_config(config.vision_config, attn_implementation="sdpa")


def _projector(config: Any, kind: type) -> Any:
    return kind(config)


def _image_mark(config: Any, words: Words) -> str:
    return words.of(config.image_token_id)


def marks(texts: list[str]) -> ChatText:
    """Return a text of marks alone."""
    return ChatText(("", *(piece for text in texts for piece in (text, ""))))


def _pixtral_text(config: Any, words: Words, inputs: Mapping[str, Tensor]) -> ChatText:
    """Return rows of image tokens; a break ends each but the last, which has an end."""
    size = config.vision_config.patch_size * config.spatial_merge_size
    height, width = (int(pixels) // size for pixels in inputs["image_sizes"][0])
    broken = str(words.settings.get("image_break_token", "[IMG_BREAK]"))
    end = str(words.settings.get("image_end_token", "[IMG_END]"))
    row = [_image_mark(config, words)] * width
    return marks([*[*row, broken] * (height - 1), *row, end])


def _gemma3_text(config: Any, words: Words, inputs: Mapping[str, Tensor]) -> ChatText:
    begin, image, end = map(words.of, (config.boi_token_index, config.image_token_id, config.eoi_token_index))
    rows = marks([begin, *[image] * config.mm_tokens_per_image, end])
    return ChatText(("\n\n", *rows.pieces[1:-1], "\n\n"))


def _gemma4_text(config: Any, words: Words, inputs: Mapping[str, Tensor]) -> ChatText:
    begin, image, end = map(words.of, (config.boi_token_id, config.image_token_id, config.eoi_token_id))
    return marks([begin, *[image] * int(inputs["num_soft_tokens_per_image"][0]), end])


def _gemma4_sight(config: Any) -> Sight:
    is_bidirectional = config.text_config.use_bidirectional_attention == "vision"
    return Sight.WINDOWED if is_bidirectional else Sight.CAUSAL


def _qwen_grid(config: Any, inputs: Mapping[str, Tensor]) -> Grid:
    """Return the grid; mRoPE's axes take turns until the numbers of their section are used up."""
    merged = config.vision_config.spatial_merge_size
    _, height, width = (int(patches) for patches in inputs["image_grid_thw"][0])
    text = config.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    usual = [24, 20, 20] if "vl" in config.model_type else [11, 11, 10]
    sections = text.rope_parameters.get("mrope_section", usual)
    axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    return Grid(height // merged, width // merged, tuple(axes))


def _qwen_text(config: Any, words: Words, inputs: Mapping[str, Tensor]) -> ChatText:
    grid = _qwen_grid(config, inputs)
    return marks([_image_mark(config, words)] * (grid.height * grid.width))


def _qwen(model_type: str) -> VisionFamily:
    return VisionFamily(
        model_type,
        {"visual": _tower},
        ("pixel_values", "image_grid_thw"),
        lambda config: {},
        _image_mark,
        _qwen_text,
        grid=_qwen_grid,
    )


_FAMILIES = (
    VisionFamily(
        "mistral3",
        {"vision_tower": _tower, "multi_modal_projector": _projector},
        ("pixel_values", "image_sizes"),
        lambda config: {"patch_size": config.vision_config.patch_size * config.spatial_merge_size},
        _image_mark,
        _pixtral_text,
    ),
    VisionFamily(
        "gemma3",
        {"vision_tower": _tower, "multi_modal_projector": _projector},
        ("pixel_values",),
        lambda config: {"do_convert_rgb": True, "do_pan_and_scan": False},
        lambda config, words: words.of(config.boi_token_index),
        _gemma3_text,
        lambda config: Sight.ALL,
    ),
    VisionFamily(
        "gemma4",
        {
            "vision_tower": _tower,
            "embed_vision": lambda config, kind: kind(config.vision_config, config.text_config),
        },
        ("pixel_values", "image_position_ids"),
        lambda config: {},
        _image_mark,
        _gemma4_text,
        _gemma4_sight,
    ),
    *map(_qwen, ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}


def rows_of(output: Any) -> Tensor:
    """Return the rows of one image from the code's output, [rows, hidden]; DeepStack's values follow."""
    rows = output.pooler_output
    rows = torch.cat(tuple(rows)) if isinstance(rows, (tuple, list)) else rows
    later = [torch.cat(tuple(level)) for level in getattr(output, "deepstack_features", None) or ()]
    return torch.cat([rows.reshape(-1, rows.shape[-1]), *later], dim=-1)
