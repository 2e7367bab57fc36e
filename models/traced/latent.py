"""Latent attention (DeepSeek, GLM-4.7-Flash): the KV cache keeps a token's latent vector and its rotated key.

All heads share them as one KV head, whose value is the latent. The matrix that would expand a
latent to a head's keys and values is multiplied with queries and with attention's output instead:

    q · (W_k c) = (W_kᵀ q) · c        sum(p W_v c) = W_v sum(p c)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.limits import LARGEST_HEAD
from neo_desktop.models.traced.sizes import Change

_EXPAND = "expand_kv"  # method of attention in transformers


def latents_kept(model: nn.Module) -> Iterator[Change]:
    """Yield the changes with which the model's attention hands on latents as keys and values."""
    for module in model.modules():
        if keeps_latent(module):
            yield module, _EXPAND, _latents


def keeps_latent(module: Any) -> bool:
    """Return True for latent attention that kernels support, if it needs less memory than expanded one."""
    if not hasattr(module, _EXPAND) or module.kv_b_proj.bias is not None:
        return False
    key = module.qk_nope_head_dim + module.qk_rope_head_dim
    width = module.kv_lora_rank + module.qk_rope_head_dim
    return bool(width <= LARGEST_HEAD and width < module.num_heads * max(key, module.v_head_dim))


def _latents(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [1, 1, rows, rank + rotated] and values [1, 1, rows, rank]."""
    return torch.cat((latent, rotated), dim=-1), latent


def queries(module: Any, query: Tensor) -> Tensor:
    """Return queries of latent keys; query: [1, heads, rows, plain + rotated numbers]."""
    plain = module.qk_nope_head_dim
    own, rotated = query[..., :plain], query[..., plain:]
    return torch.cat((own @ _of_heads(module)[:, :plain], rotated), dim=-1)


def results(module: Any, attended: Tensor) -> Tensor:
    """Return [1, heads, rows, values] from attention's output, [1, heads, rows, rank]."""
    return attended @ _of_heads(module)[:, module.qk_nope_head_dim :].transpose(1, 2)


def _of_heads(module: Any) -> Tensor:
    """Return each head's rows for keys, then those for values: [heads, rows, rank]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
