"""Write the trained model as an ordinary Hugging Face checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from research.builtin.tokenizer import BEGIN, CHAT_TEMPLATE, END

BUILTIN = Path(__file__).resolve().parents[2] / "models" / "builtin"


def save_checkpoint(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config, generation settings, fp16 weights and tokenizer; the model card is written by hand."""
    config = model.config
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config_json(config))
    _write_json(directory / "generation_config.json", _generation_json(config))
    _write_json(directory / "tokenizer_config.json", _tokenizer_json(config))
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    half = {name: tensor.to(torch.float16).contiguous() for name, tensor in weights.items()}
    save_file(half, directory / "model.safetensors", metadata={"format": "pt"})


def _config_json(config: LlamaConfig) -> dict[str, object]:
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id",
        "pad_token_id", "initializer_range",
    )  # fmt: skip
    shape = {name: getattr(config, name) for name in names}
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
    }
    return {**fixed, **shape}


def _generation_json(config: LlamaConfig) -> dict[str, object]:
    # Greedy: every question has one right answer, and a small model gains nothing from chance.
    return {
        "do_sample": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _tokenizer_json(config: LlamaConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
