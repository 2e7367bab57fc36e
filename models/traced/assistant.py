"""Gemma 4's assistant: a small model that drafts from another model's hidden states and KV.

    x = pre_projection(concat(embedding, hidden state))     both as wide as the model's
    normed = norm(layers(x))                                queries alone: keys and values are the model's
    token = argmax(head(normed))
    hidden state for the next token = post_projection(normed)

The embedding is the model's. Some assistants choose among the tokens of the clusters that a small matrix
scores highest. All drafted tokens have the position of the first one, because KV of drafts does not exist.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.deepstack import deepstack

POST_PROJECTION = "post_projection"  # name of the matrix
_CLUSTERS = ("masked_embedding.centroids.weight", "masked_embedding.token_ordering")


class Clusters(NamedTuple):
    """The tokens among which an assistant chooses."""

    centroids: StoredTensor  # [clusters, hidden]
    token_ids: StoredTensor  # [vocab], cluster after cluster
    most: int  # clusters per choice


class Pairing(NamedTuple):
    """The parts of an assistant that its decoder lacks."""

    layers: tuple[int, ...]  # per layer of the assistant: the model's layer with its KV
    clusters: Clusters | None  # None: it chooses among all tokens


def config_of(config: Any) -> Any:
    """Return the configuration of an assistant that scores all tokens."""
    config = deepcopy(config)
    config.use_ordered_embeddings, config.architectures = False, None
    return config


def add_to(model: Any) -> None:
    """Give an assistant the inputs of other models: token ids and positions.

    Its keys and values have the shapes of the model's, and no meaning: the drafter reads the model's.
    """
    text, width = model.config.get_text_config(), model.config.backbone_hidden_size
    table_class: Any = type(model.model.embed_tokens)
    with torch.device("meta"):
        table = table_class(text.vocab_size, width, None, embed_scale=width**0.5).to(model.dtype)
    model.backbone_embedding = table
    shapes = dict.fromkeys(("sliding_attention", "full_attention"), (1, 1))
    for index, kind in enumerate(text.layer_types):
        shapes[kind] = text.per_layer_config[index].num_key_value_heads, text.per_layer_config[index].head_dim

    def given(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        token_ids: Tensor = named.pop("input_ids")
        embedded = table(token_ids)
        hidden = deepstack(token_ids, width, model.dtype)
        number = embedded[:, None, :, :1]
        states = {kind: (number.expand(-1, heads, -1, dim),) * 2 for kind, (heads, dim) in shapes.items()}
        both = torch.cat((embedded, hidden), dim=-1)
        return args, named | {"inputs_embeds": both, "shared_kv_states": states}

    def no_masks(*_: Any) -> dict[str, None]:
        return dict.fromkeys(shapes)

    model.register_forward_pre_hook(given, with_kwargs=True)
    model.create_attention_masks = no_masks
    model.model.first_kv_shared_layer_idx = -1  # its code would drop rows there, all but the last one
    model._init_weights = model.model._init_weights  # also computes the frequencies of RoPE


def pairing(name: str, own: Any, model: Any, tensors: dict[str, StoredTensor]) -> Pairing:
    """Return the pairing of an assistant and a model; remove the tensors of the clusters.

    Args:
        own: the assistant's configuration.
        model: the configuration of the model's text; None: the model is of another kind.
        tensors: of the assistant.

    Raises:
        ModelError: it was made for another model.
    """
    wanted = f"{name} drafts for a Gemma 4 model"
    advice = "choose the assistant of this model, or leave draft_model out"
    if model is None or not str(model.model_type).startswith("gemma4"):
        raise ModelError(f"{wanted}, and this is another one: {advice}.")
    text = own.get_text_config()
    for what, wants, has in (
        ("hidden states of {} numbers", own.backbone_hidden_size, model.hidden_size),
        ("a vocabulary of {} tokens", text.vocab_size, model.vocab_size),
    ):
        if wants != has:
            raise ModelError(f"{wanted} with {what.format(wants)}, and this one has {has}: {advice}.")
    stores = [mode == "store" for mode in model.kv_sharing_modes]
    layers = []
    for index, kind in enumerate(text.layer_types):
        last = [at for at, of in enumerate(model.layer_types) if of == kind and stores[at]]
        if not last:
            raise ModelError(f"{wanted} with layers of {kind}, and this one has none: {advice}.")
        wants, has = (
            (each.num_key_value_heads, each.head_dim)
            for each in (text.per_layer_config[index], model.per_layer_config[last[0]])
        )
        if wants != has:
            raise ModelError(
                f"{wanted} with {wants[0]} KV heads of {wants[1]} numbers in layers of {kind}, and this one "
                f"has {has[0]} of {has[1]}: {advice}."
            )
        layers.append(last[0])
    found = [tensors.pop(each, None) for each in _CLUSTERS]
    clusters = None
    if own.use_ordered_embeddings:
        if found[0] is None or found[1] is None:
            raise ModelError(f"{name} lacks {' or '.join(_CLUSTERS)}: download it again.")
        clusters = Clusters(found[0], found[1], own.centroid_intermediate_top_k)
    return Pairing(tuple(layers), clusters)
