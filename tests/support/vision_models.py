"""Small models of transformers that read images, with random weights."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import greedy_settings, save_tokenizer
from PIL import Image
from traced_models import FAMILIES, GEMMA_4, SIZES, YARN
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FIRST_TOKEN = 261  # of the image tokens, see `save_tokenizer`
UNUSED = ("num_crops", "num_soft_tokens_per_image")  # results of image processors that models do not take
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = {key: value for key, value in SIZES.items() if not key.endswith("_id")}
TEXT |= {"head_dim": 16, "vocab_size": 304, "max_position_embeddings": 512}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 7,
}


@dataclass(frozen=True)
class VisionCase:
    """A family: its configuration, image processor, image tokens, and the template's text of an image."""

    model_type: str
    changes: dict[str, Any]
    image_processor: str
    settings: dict[str, Any]
    tokens: tuple[str, ...]
    mark: str


def _qwen(
    model_type: str, text: dict[str, Any], rotations: dict[str, Any], vision: dict[str, Any]
) -> VisionCase:
    """Return a family with Qwen's image tokens and rotations by time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 100.0} | rotations
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 7}
    tokens = "vision_start", "image", "vision_end", "video"
    return VisionCase(
        model_type,
        {
            "text_config": TEXT | text | {"rope_parameters": rope},
            "vision_config": sizes | {"out_hidden_size": 64, "num_position_embeddings": 64} | vision,
            **{f"{name}_token_id": FIRST_TOKEN + number for number, name in enumerate(tokens)},
        },
        "Qwen2VLImageProcessor",
        {"patch_size": 7, "size": {"shortest_edge": 14 * 14, "longest_edge": 80 * 80}},
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    )


CASES = {
    "mistral3": VisionCase(
        "mistral3",
        {
            "text_config": {
                "model_type": "ministral3",
                **TEXT,
                "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1},
            },
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": FIRST_TOKEN,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "PixtralImageProcessor",
        {"size": {"longest_edge": 56}, "patch_size": 14},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
    ),
    "qwen3.5": _qwen(  # recurrent layers, and rotations by time, height and width
        "qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
        {"depth": 2},
    ),
    "qwen3-vl": _qwen(  # rows of images enter the first layers again
        "qwen3_vl", {}, {"mrope_section": [4, 2, 2]}, {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    ),
    "gemma4": VisionCase(  # the rows of an image see each other in layers with a window
        "gemma4",
        {
            "text_config": TEXT
            | GEMMA_4
            | {
                "sliding_window": 12,
                "vocab_size_per_layer_input": 304,
                "use_bidirectional_attention": "vision",
                "tie_word_embeddings": False,
            },
            "vision_config": VISION
            | {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "tie_word_embeddings": False,
            "boi_token_id": FIRST_TOKEN,
            "image_token_id": FIRST_TOKEN + 1,
            "eoi_token_id": FIRST_TOKEN + 2,
            "video_token_id": FIRST_TOKEN + 3,
            "audio_token_id": FIRST_TOKEN + 4,
        },
        "Gemma4ImageProcessor",
        {"patch_size": 7, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>"),
        "<|image|>",
    ),
    "gemma3": VisionCase(  # the rows of an image are more than a window, and see each other
        "gemma3",
        {
            "text_config": TEXT
            | {
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"],
                "tie_word_embeddings": False,
            },
            "tie_word_embeddings": False,
            "vision_config": VISION,
            "boi_token_index": FIRST_TOKEN,
            "image_token_index": FIRST_TOKEN + 1,
            "eoi_token_index": FIRST_TOKEN + 2,
            "mm_tokens_per_image": 16,
        },
        "Gemma3ImageProcessor",
        {"size": {"height": 56, "width": 56}},
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
    ),
}


CASES["gemma4-e"] = replace(  # with embeddings per layer, and without sight of later rows
    CASES["gemma4"],
    changes=CASES["gemma4"].changes
    | {
        "text_config": TEXT
        | FAMILIES["gemma4-e"][1]
        | {"sliding_window": 12, "vocab_size_per_layer_input": 304, "tie_word_embeddings": False}
    },
)


def save(folder: Path, family: str, seed: int = 0, case: VisionCase | None = None) -> Path:
    """Write a checkpoint of a small model that reads images, with random weights; `case`: changed sizes."""
    case = case or CASES[family]
    torch.manual_seed(seed)
    make: Any = AutoModelForImageTextToText
    model = make.from_config(CONFIG_MAPPING[case.model_type](**case.changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.1)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder, more=case.tokens, template=TEMPLATE.replace("IMAGE", case.mark))
    kind: Any = getattr(transformers, f"{case.image_processor}Pil")
    kind(**case.settings).save_pretrained(folder)
    return folder


def picture(width: int = 50, height: int = 40, seed: int = 0, form: str = "PNG") -> bytes:
    """Return an image file of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(file, form)
    return file.getvalue()


def bomb() -> bytes:
    """Return a small file of a large image."""
    file = io.BytesIO()
    Image.new("1", (20_000, 4_000)).save(file, "PNG")
    return file.getvalue()


def greedy(folder: Path, prompt: Sequence[int], files: list[bytes], num_tokens: int) -> list[int]:
    """Return transformers' greedy tokens in float32 for a prompt with the rows of some images."""
    return list(_greedy(folder, tuple(prompt), tuple(files), num_tokens))


@cache
@torch.inference_mode()
def _greedy(
    folder: Path, prompt: tuple[int, ...], files: tuple[bytes, ...], num_tokens: int
) -> tuple[int, ...]:
    model, processor = _loaded(folder)
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    patch = {"patch_size": 14} if model.config.model_type == "mistral3" else {}
    inputs = processor(pictures, return_tensors="pt", **patch) if pictures else {}
    token_ids = torch.tensor([prompt])
    kinds = (token_ids == model.config.image_token_id).int()
    names = {"gemma3": "token_type_ids", "mistral3": None}
    name = names.get(model.config.model_type, "mm_token_type_ids")
    output = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **{key: value for key, value in inputs.items() if key not in UNUSED},
        **({name: kinds} if name and pictures else {}),
        **greedy_settings(num_tokens),
    )
    return tuple(output[0, len(prompt) :].tolist())


@lru_cache(1)
def _loaded(folder: Path) -> tuple[Any, Any]:
    make: Any = AutoModelForImageTextToText
    kinds: Any = AutoImageProcessor
    return make.from_pretrained(folder, dtype=torch.float32), kinds.from_pretrained(folder, backend="pil")
