"""Small random checkpoints of every family, written by transformers."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": 257,
    "initializer_range": 0.2,  # wide enough that greedy choices are clear-cut
}
_FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, object]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama3-tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 40}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"intermediate_size": 128, "num_local_experts": 4}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "intermediate_size": 128,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def save_checkpoint(
    folder: Path, family: str, seed: int = 0, with_template: bool = True, **sizes: object
) -> Path:
    """Write a checkpoint for transformers and this project; return its folder.

    Args:
        sizes: changes to the family's usual sizes.
    """
    key = repr((family, seed, with_template, sorted(sizes.items())))
    if key not in _saved:
        _save(folder, family, seed, with_template, sizes)
        _saved[key] = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _saved[key].items():
        (folder / name).write_bytes(content)
    return folder


_saved: dict[str, dict[str, bytes]] = {}  # files of checkpoints that this process has made


def _save(folder: Path, family: str, seed: int, with_template: bool, sizes: dict[str, object]) -> None:
    torch.manual_seed(seed)
    model_class, config_class, changes = _FAMILIES[family]
    model = model_class(config_class(**(_SIZES | changes | sizes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts biases at zero, which would hide a missing bias
            torch.nn.init.normal_(parameter, std=0.1)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder, with_template)


class Checkpoints(dict[str, Path]):
    """One checkpoint per family, saved at its first use; tests never change a checkpoint."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, family: str) -> Path:
        self[family] = save_checkpoint(self._make_folder(family), family)
        return self[family]


def transformers_greedy(
    folder: Path, prompt: list[int], num_tokens: int, attention: str | None = None
) -> list[int]:
    """Return transformers' greedy tokens in float32; attention: its implementation, None: its default."""
    return list(_greedy(folder, tuple(prompt), num_tokens, attention))


def greedy_settings(num_tokens: int) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` for exactly this number of most probable tokens."""
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    return length | {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@cache
@torch.inference_mode()
def _greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int, attention: str | None) -> tuple[int, ...]:
    token_ids = torch.tensor([prompt])
    output = _model(folder, attention).generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        **greedy_settings(num_tokens),
    )
    return tuple(output[0, len(prompt) :].tolist())


@lru_cache(1)
def _model(folder: Path, attention: str | None) -> Any:
    config = AutoConfig.from_pretrained(folder)
    reads_images = config.model_type == "mistral3"  # not among the causal models
    of_kind: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    return of_kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def save_tokenizer(
    folder: Path, with_template: bool = True, more: Sequence[str] = (), template: str = CHAT_TEMPLATE
) -> None:
    """Write a byte-level tokenizer with chat tokens; `more` special tokens have ids from 261 on."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    roles = ["<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        bos_token="<|begin|>",
        additional_special_tokens=[*roles, *more],
    )
    if with_template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
