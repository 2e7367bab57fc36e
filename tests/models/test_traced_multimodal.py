"""Multimodal checkpoints: the traced model computes the text alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tokenizer, transformers_greedy
from safetensors.torch import load_file, save_file
from seeds import first
from traced_models import GEMMA_4, SIZES, YARN
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.traced.config import TracedConfig

TEXT = {key: value for key, value in SIZES.items() if not key.endswith("_id")}
TEXT |= {"head_dim": 16, "vocab_size": 304}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VISION_4 = {key: value for key, value in VISION.items() if key != "image_size"} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 1,
    "position_embedding_size": 16,
}
SOUND = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}
# Changes of the configuration, and parts of weight names that text does not need.
MULTIMODAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gemma3": (
        {
            "text_config": TEXT | {"sliding_window": 9},
            "vision_config": VISION,
            "image_token_index": 7,
            "boi_token_index": 8,
            "eoi_token_index": 9,
            "mm_tokens_per_image": 4,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "gemma4": (
        {
            "text_config": TEXT | GEMMA_4 | {"vocab_size_per_layer_input": 304},
            "vision_config": VISION_4,
            "audio_config": None,
            "image_token_id": 290,
            "video_token_id": 291,
            "audio_token_id": 292,
        },
        ("vision_tower", "embed_vision"),
    ),
    "mistral3": (
        {
            "text_config": {
                "model_type": "ministral3",
                **TEXT,
                "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1},
            },
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": 7,
            "vision_feature_layer": -1,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "got_ocr2": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": VISION | {"mlp_dim": 16, "output_channels": 16, "global_attn_indexes": [0]},
            "image_token_index": 7,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "phi4_multimodal": (
        SIZES | TEXT | {"vision_config": VISION, "audio_config": SOUND},
        ("embed_tokens_extend",),
    ),
}


@pytest.fixture(params=first(MULTIMODAL, 2))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """Return a folder, and the number of parameters that its text model needs."""
    torch.manual_seed(0)
    changes, others = MULTIMODAL[request.param]
    model: Any = AutoModelForImageTextToText if request.param == "mistral3" else AutoModelForCausalLM
    model = model.from_config(CONFIG_MAPPING[request.param](**changes))
    scalars = [(name, each) for name, each in model.named_buffers() if name.endswith("layer_scalar")]
    sizes = {name: each.numel() for name, each in (*model.named_parameters(), *scalars)}
    of_text = {name: size for name, size in sizes.items() if not set(others) & set(name.split("."))}
    assert len(of_text) < len(sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.8 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path, sum(of_text.values())


def test_weights_that_text_does_not_need_are_neither_counted_nor_loaded(saved: tuple[Path, int]) -> None:
    folder, count = saved
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config()
    assert isinstance(config, TracedConfig)
    assert config.num_parameters == count
    loading = check_model(checkpoint, config)
    assert loading.nbytes == config.weight_bytes(torch.float32) == 4 * count
    decoder = load_model(checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    assert decoder.nbytes == 4 * count
    assert loading.notes == [f"skips {len(config.of_model.unread)} weights that text does not need"]


def test_a_weight_that_no_part_has_is_refused(saved: tuple[Path, int]) -> None:
    folder, _ = saved
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.vision_tower.other.weight": torch.zeros(2)}, file, {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        ModelError, match=r"config\.json does not describe, model\.vision_tower\.other\.weight"
    ):
        check_model(checkpoint, checkpoint.config())


@pytest.mark.sample(1)
def test_the_tokens_are_those_of_transformers(saved: tuple[Path, int]) -> None:
    folder, _ = saved
    prompts = [torch.arange(20, 20 + count).tolist() for count in (1, 30)]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(folder, device="cpu", gpu_cache_tokens=64) as engine:
        outputs = engine.generate(prompts, greedy)
    assert [list(each.token_ids) for each in outputs] == [
        transformers_greedy(folder, prompt, 8) for prompt in prompts
    ]
