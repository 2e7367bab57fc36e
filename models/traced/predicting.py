"""A layer of multi-token prediction as a model of its own: it drafts the token after the next one.

From the embedding of a token and the last hidden state of the token before it, the layer predicts the token
after both:

    x = eh_proj(concat(enorm(embedding), hnorm(hidden state)))
    hidden state = final norm(layer(x))

Embedding and output head are the main model's. The layer is the family's decoder layer, so its code is that
of a model of transformers with one layer, whose embeddings are combined with given hidden states. Nemotron-H
has attention and experts in layers of their own, so it has two.
"""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.deepstack import deepstack

LAYER, NORMS = "model.layers.0.", ("model.norm.", "model.norm_f.")  # of the parameters
_OF_MODULE = {  # in Qwen's `mtp` module -> the parameter
    "fc": f"{LAYER}eh_proj.",
    "pre_fc_norm_embedding": f"{LAYER}enorm.",
    "pre_fc_norm_hidden": f"{LAYER}hnorm.",
}
_FINAL_NORM = re.compile(r"(?:shared_head\.norm|final_layernorm)\.")
_MODULE = re.compile(r"(?:^|\.)mtp\.(?:layers\.(\d+)\.)?(.+)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")
_SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the main model's


def config_of(config: Any) -> Any:
    """Return the configuration of a model that has nothing but a layer of multi-token prediction."""
    text = deepcopy(config.get_text_config(decoder=True))
    text.architectures = None
    kinds = getattr(text, "mtp_layers_block_type", None)
    if kinds is not None:  # Nemotron-H; the number of layers follows
        text.layer_types = list(kinds)
        return text
    text.num_hidden_layers = 1
    for key, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(text, key, None) is not None:
            setattr(text, key, [kind])
    if hasattr(text, "first_k_dense_replace"):
        text.first_k_dense_replace = 0
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = []
    return text


def add_to(model: Any) -> None:
    """Let a model combine its embeddings with given hidden states, before its first layer."""
    base, width = model.base_model, model.config.hidden_size
    layer, norm = base.layers[0], getattr(base, "norm", None) or base.norm_f
    layer.enorm, layer.hnorm = deepcopy(norm), deepcopy(norm)
    layer.eh_proj = nn.Linear(2 * width, width, bias=False, dtype=model.dtype, device="meta")

    def combined(_: nn.Module, given: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        hidden = deepstack(given[0], width, model.dtype)
        both: Tensor = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), dim=-1))
        return both

    model.get_input_embeddings().register_forward_hook(combined)


def parameters_of_layer(
    tensors: Mapping[str, StoredTensor], parameters: Collection[str]
) -> dict[str, StoredTensor]:
    """Return the first layer's tensors by parameter name.

    Args:
        tensors: of multi-token prediction, as a folder names them.
        parameters: names of the layer's parameters outside matrices.
    """
    count = 1 + max(int(found[1]) for name in parameters if (found := _LAYER.search(name)) is not None)
    norm = next(name for name in NORMS if f"{name}weight" in parameters)
    numbers = [int(found[1]) for name in tensors if (found := _LAYER.search(name)) is not None]
    first, found_tensors = min(numbers, default=0), dict[str, StoredTensor]()
    for name, stored in tensors.items():
        in_module, in_layer = _MODULE.search(name), _LAYER.search(name)
        if in_module is not None and in_module[1] is None:
            kind, _, end = in_module[2].partition(".")
            prefix = norm if kind == "norm" else _OF_MODULE.get(kind, f"mtp.{kind}.")
            found_tensors[prefix + end] = stored
        elif in_layer is not None and not in_layer[2].startswith(_SHARED):
            number, end = int(in_layer[1]) - first, in_layer[2]
            is_norm = _FINAL_NORM.match(end)
            if number < count:
                prefix = norm if is_norm else f"model.layers.{number}."
                found_tensors[prefix + _FINAL_NORM.sub("", end)] = stored
    return found_tensors
