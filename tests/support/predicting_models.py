"""Small models of transformers with a layer of multi-token prediction, and what that layer computes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_hybrids import WRITTEN, write_hybrid
from recurrent_models import RECURRENT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from traced_models import FAMILIES, SIZES, save
from transformers import AutoModelForCausalLM

_IN_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
IN_MODULE = ("qwen3.5", "qwen3.5-moe", "qwen3-next")  # others number the layer after the model's last one
_QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
_NEMOTRON = {
    **{part: f"mtp.layers.0.{part}" for part in ("eh_proj", "enorm", "hnorm")},
    "norm": "mtp.layers.1.final_layernorm",
    "layer": "mtp.layers.0",
}
NEMOTRON_KINDS = ["full_attention", "moe"]  # of its two layers


@dataclass(frozen=True)
class Reference:
    """A layer of multi-token prediction in torch."""

    main: Any  # the model
    one_layer: Any  # a model with this layer and its final norm
    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: Tensor  # [hidden, 2 * hidden]

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return the model's last hidden states [n, hidden] of a sequence of tokens [n]."""
        with torch.no_grad():
            states: Tensor = self.main.model(token_ids[None], use_cache=False).last_hidden_state[0]
        return states

    def predict(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's scores [n, vocab] and hidden states [n, hidden].

        Args:
            token_ids: [n]
            hidden: [n, hidden], of the preceding tokens.
        """
        with torch.no_grad():
            embedded = self.main.get_input_embeddings()(token_ids)
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1) @ self.eh_proj.T
            states = self.one_layer.model(inputs_embeds=both[None], use_cache=False).last_hidden_state[0]
            return self.main.lm_head(states), states


def final_norm_of(model: Any) -> nn.Module:
    """Return the norm before a model's head."""
    norm: nn.Module = getattr(model.model, "norm", None) or model.model.norm_f
    return norm


def names_of(family: str, num_layers: int) -> dict[str, str]:
    """Return the names of the layer's modules in a checkpoint."""
    if family in IN_MODULE:
        return _QWEN
    if family.startswith("nemotron"):
        return _NEMOTRON
    layer = f"model.layers.{num_layers}"
    parts = ("eh_proj", "enorm", "hnorm")
    return {part: f"{layer}.{part}" for part in parts} | {"norm": f"{layer}.shared_head.norm", "layer": layer}


def save_predicting(folder: Path, family: str, seed: int = 0) -> Reference:
    """Write a checkpoint with random weights and a layer of multi-token prediction."""
    model_type, changes = (FAMILIES | RECURRENT)[family]
    save(folder, model_type, changes, seed)
    one = dict(changes) | {"num_hidden_layers": 1}
    if "layer_types" in one:
        one["layer_types"] = ["full_attention"]
    if "layers_block_type" in one:
        one |= {"layers_block_type": NEMOTRON_KINDS, "num_hidden_layers": 2}
    if model_type == "glm4_moe_lite":
        one["mlp_layer_types"] = ["sparse"]
        del one["first_k_dense_replace"]
    elif "first_k_dense_replace" in one:
        one["first_k_dense_replace"] = 0
    save(folder / "one", model_type, one, seed + 1)
    make: Any = AutoModelForCausalLM
    main, one_layer = (
        make.from_pretrained(path, dtype=torch.float32).eval() for path in (folder, folder / "one")
    )
    generator = torch.Generator().manual_seed(seed)
    hidden = SIZES["hidden_size"]
    own: dict[str, Tensor] = {"eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) * 0.2}
    own |= {name: torch.rand(hidden, generator=generator) for name in ("enorm", "hnorm")}
    names, tensors = names_of(family, main.config.num_hidden_layers), load_file(folder / "model.safetensors")
    stored = {f"{names[name]}.weight": value for name, value in own.items()}
    for name, value in load_file(folder / "one" / "model.safetensors").items():
        if (found := _IN_LAYER.match(name)) is not None:
            number = int(found[1])
            own_layer = names["layer"] if not number else f"mtp.layers.{number}"
            stored[f"{own_layer}.{found[2]}"] = value
    final_norm: Any = final_norm_of(one_layer)
    stored[f"{names['norm']}.weight"] = final_norm.weight.detach().clone()
    if names["layer"].startswith("model."):  # copies
        stored[f"{names['layer']}.embed_tokens.weight"] = main.get_input_embeddings().weight.detach().clone()
        stored[f"{names['layer']}.shared_head.head.weight"] = main.lm_head.weight.detach().clone()
    save_file(tensors | stored, folder / "model.safetensors", {"format": "pt"})
    enorm, hnorm = norm_like(one_layer, own["enorm"]), norm_like(one_layer, own["hnorm"])
    return Reference(main, one_layer, enorm, hnorm, own["eh_proj"])


def write_predicting(folder: Path, family: str) -> tuple[Path, Reference]:
    """Write a GGUF file with a layer of multi-token prediction, and return it with the reference."""
    of_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    is_nemotron = family.startswith("nemotron")
    if is_nemotron:
        of_layer = {"layers_block_type": NEMOTRON_KINDS}
    one_path, one_layer = write_hybrid(folder / "one", family, sizes=of_layer)
    generator, hidden = torch.Generator().manual_seed(2), SIZES["hidden_size"]
    own = {"eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) * 0.2}
    own |= {name: torch.rand(hidden, generator=generator) for name in ("enorm", "hnorm")}
    is_shifted = family.startswith("qwen3.5")
    settings = WRITTEN[family][2]
    layers = len(settings.get("layers_block_type", ())) or settings.get(
        "num_hidden_layers", SIZES["num_hidden_layers"]
    )
    stored = {f"blk.{layers}.nextn.{name}.weight": value + is_shifted for name, value in own.items()}
    stored[f"blk.{layers}.nextn.eh_proj.weight"] = own["eh_proj"]
    for tensor in gguf.GGUFReader(one_path).tensors:
        value = torch.from_numpy(tensor.data.copy())
        if tensor.name == "blk.1.attn_norm.weight":
            stored[f"blk.{layers}.post_attention_norm.weight"] = value
        elif tensor.name.startswith(("blk.0.", "blk.1.")):
            stored[f"blk.{layers}{tensor.name[5:]}"] = value
        elif tensor.name == "output_norm.weight":
            stored[f"blk.{layers}.nextn.shared_head_norm.weight"] = value
        elif tensor.name == "output.weight":
            stored[f"blk.{layers}.nextn.shared_head_head.weight"] = value
    metadata: dict[str, Any] = {"block_count": layers + 1, "nextn_predict_layers": 1}
    if "layer_types" in settings:
        kinds = [*settings["layer_types"], "full_attention"]
        metadata["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
    if is_nemotron:  # the layer is the last number
        kinds, kv_heads = settings["layers_block_type"], SIZES["num_key_value_heads"]
        metadata["attention.head_count_kv"] = [kv_heads * (kind == "full_attention") for kind in kinds] + [
            kv_heads
        ]
        width = settings["moe_intermediate_size"]
        metadata["feed_forward_length"] = [width * (kind == "moe") for kind in kinds] + [width]
    path, main = write_hybrid(folder, family, metadata=metadata, tensors=stored)
    enorm, hnorm = norm_like(one_layer, own["enorm"]), norm_like(one_layer, own["hnorm"])
    return path, Reference(main, one_layer, enorm, hnorm, own["eh_proj"])


def norm_like(model: Any, weight: Tensor) -> nn.Module:
    """Return a norm of a model's kind with other weights."""
    own = final_norm_of(model)
    eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
    norm: nn.Module = type(own)(len(weight), eps=eps)
    norm.weight.data.copy_(weight)  # type: ignore[operator]
    return norm


def save_chain(folder: Path, family: str, noise: float = 0.0) -> None:
    """Write a checkpoint whose layer of multi-token prediction is nearly always right.

    A token's embedding is a unit vector, and the model's head chooses the token that follows in a fixed
    order. The layer ignores its token: it turns the last hidden state by one step in that order. So its
    drafts are right if every hidden state is in its place.

    Args:
        noise: size of what the model's layers add to the embedding; with more, the layer is wrong more often.
    """
    reference = save_predicting(folder, family)
    width, vocab = SIZES["hidden_size"], SIZES["vocab_size"]
    names = names_of(family, reference.main.config.num_hidden_layers)
    tensors = load_file(folder / "model.safetensors")
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
    for name, value in tensors.items():
        if name.endswith(ends):
            value.mul_(0.0 if name.startswith(names["layer"]) else noise)
        elif name.endswith("norm.weight") and value.shape == (width,):
            value.fill_(0.0 if family in IN_MODULE else 1.0)
    next_of = torch.eye(width).roll(1, 0)  # turns a unit vector into the next one
    embedding, head = torch.zeros(vocab, width), torch.zeros(vocab, width)
    embedding[:] = torch.eye(width).repeat(vocab // width + 1, 1)[:vocab]
    head[:width] = next_of
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embedding, head
    tensors[f"{names['eh_proj']}.weight"] = torch.cat((torch.zeros(width, width), next_of), dim=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
