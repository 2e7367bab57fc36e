"""A model's logits without a KV cache, a batch or a kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.ops import Reduce
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State


def logits_of_all(
    model: Decoder,
    token_ids: Tensor,
    reduce: Reduce | None = None,
    stages: Stages | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return scores `[n, vocab]` float32 after each token `[n]`; attention in float64.

    Args:
        lengths: of the sequences that follow each other; None: a single sequence.
    """
    config, device = model.config, model.device
    of = config, len(token_ids), model.dtype, device
    state = State.empty(*of, Scratch.empty(*of))
    stages = stages or Stages(model, reduce=reduce)
    parts = torch.tensor(lengths or [len(token_ids)], device=device)
    owners = torch.arange(len(parts), device=device).repeat_interleave(parts, output_size=len(token_ids))
    positions = torch.arange(len(token_ids), device=device) - (parts.cumsum(0) - parts)[owners]
    distance = positions[:, None] - positions
    are_apart = owners[:, None] != owners
    stages.embed(token_ids.to(device), positions, state)
    for layer, window in enumerate(config.layer_windows):
        stages.advance(layer, state)
        q, k, v = (heads.double() for heads in stages.heads(state))
        k, v = (heads.repeat_interleave(config.group_size, dim=1) for heads in (k, v))
        unseen = are_apart | (distance < 0) | (distance >= (window or len(token_ids)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * (scores / config.attention_softcap).tanh()
        scores = scores.masked_fill(unseen, -torch.inf)
        if model.sinks is not None:
            sinks = model.sinks[layer]
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(token_ids), 1)), 2)
        weights = scores.softmax(-1)[:, :, : len(token_ids)]
        state.attention.copy_(torch.einsum("hqk,khd->qhd", weights, v))
    stages.advance(config.num_layers, state)
    normed = state.residual.new_empty(len(token_ids), config.hidden_size)
    stages.final_norm(state, normed)
    return stages.logits(normed, normed.new_empty(len(token_ids), config.vocab_size)).float()
