"""Try the model types of Transformers that run here: a small random model per type.

    python -m scripts.architectures                   all causal language models, some ten minutes
    python -m scripts.architectures phi3 olmoe        these

In float32, the logits of Transformers are compared with those of the stages cut from its code. Refusals are
shown with their reason. Each model type runs in its own process.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced.config import read_traced

CPU = torch.device("cpu")
TIMEOUT_S = 180.0
MOST_PARAMETERS = 30_000_000
TOKENS = torch.arange(3, 27) * 7 % 300
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Entries that some configurations have.
EXPERTS = {
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
OTHERS = {"ffn_dim": 96, "n_inner": 96, "word_embed_proj_dim": 64, "rotary_dim": 8}


def sizes(usual: Any) -> Iterator[dict[str, Any]]:
    """Yield keyword sets for a small model of a type; one of the sets fits."""
    found = dict[str, Any](SIZES) | {"intermediate_size": 256 if hasattr(usual, "num_local_experts") else 96}
    for table in (EXPERTS, OTHERS, LATENT if hasattr(usual, "kv_lora_rank") else {}):
        found |= {name: size for name, size in table.items() if hasattr(usual, name)}
    if "kv_lora_rank" in found:
        found["num_key_value_heads"] = 4
    if "moe_intermediate_size" in found:
        found["intermediate_size"] = 256
    full = {"layer_types": ["full_attention"] * 3}
    yield from (found, found | {"head_dim": 16}, found | full, found | full | {"head_dim": 16})
    yield {name: size for name, size in found.items() if name != "num_key_value_heads"}


def save(model_type: str, folder: Path) -> Tensor:
    """Write a small model with random weights; return its logits."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - large
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - large

    made, first = CONFIG_MAPPING[model_type], None
    make: Any = AutoModelForCausalLM
    for each in sizes(made()):
        try:
            torch.manual_seed(0)
            model = make.from_config(made(**each))
            if model.num_parameters() > MOST_PARAMETERS:
                raise ValueError("it cannot be made small")
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, *((0.0, 0.15) if parameter.dim() > 1 else (0.8, 0.1)))
            model = model.float().eval()
            model.save_pretrained(folder)
            with torch.inference_mode():
                scores: Tensor = model(TOKENS[None]).logits[0]
            return scores
        except Exception as error:  # third-party code may raise anything
            first = first or error
    raise RuntimeError(f"no small one can be made ({str(first).splitlines()[0][:80]})")


def scores_of(decoder: Decoder, stages: Stages) -> Tensor:
    """Return the logits after each token, [n, vocab]."""
    config, rows = decoder.config, len(TOKENS)
    of = config, rows, decoder.dtype, CPU
    state = State.empty(*of, Scratch.empty(*of))
    positions = torch.arange(rows)
    distance = positions[:, None] - positions
    stages.embed(TOKENS, positions, state)
    for layer, window in enumerate(config.layer_windows):
        stages.advance(layer, state)
        q, k, v = (heads.transpose(0, 1) for heads in stages.heads(state))
        k, v = (heads.repeat_interleave(config.group_size, 0) for heads in (k, v))
        seen = (distance >= 0) & (distance < (window or rows))
        if config.attention_softcap is None:
            out = scaled_dot_product_attention(q, k, v, seen, scale=config.attention_scale)
        else:
            cap = config.attention_softcap
            scores = cap * (q @ k.transpose(1, 2) * config.attention_scale / cap).tanh()
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        state.attention.copy_(out.transpose(0, 1))
    stages.advance(config.num_layers, state)
    normed = torch.empty(rows, config.hidden_size)
    stages.final_norm(state, normed)
    return stages.logits(normed, torch.empty(rows, config.vocab_size))


def off(found: Tensor, expected: Tensor) -> str:
    """Return the deviation of logits from the expected ones."""
    error = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
    return f"off by {error:.1e}" if error < 1e-4 else f"WRONG, off by {error:.1e}"


def tried(model_type: str) -> str:
    """Return the result for a model type."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            expected = save(model_type, folder)
            decoder = load_model(
                open_checkpoint(folder), read_traced(folder), dtype=torch.float32, device=CPU
            )
            return off(scores_of(decoder, stages_of(decoder, None)), expected)
        except (ModelError, RuntimeError) as error:
            return f"no: {str(error).split('config.json ')[-1]}"


def main() -> None:
    """Try each model type in a process, which may need too much memory or time."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    names = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for name in names:
        code = f"from scripts.architectures import tried; print(tried({name!r}))"
        try:
            process = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            lines = process.stdout.strip().splitlines() or [f"no: it ended with {process.returncode}"]
        except subprocess.TimeoutExpired:
            lines = ["no: it takes too long"]
        print(f"{name}: {lines[-1]}", flush=True)


if __name__ == "__main__":
    main()
