"""Latent attention (DeepSeek, GLM-4.7-Flash): the KV cache keeps a token's latent vector and its rotated key.

All heads share them as one KV head, whose value is the latent. The matrix that would expand a
latent to a head's keys and values is multiplied with queries and with attention's output instead:

    q · (W_k c) = (W_kᵀ q) · c        sum(p W_v c) = W_v sum(p c)

So a head has two matrices, W_kᵀ and W_v, as in GGUF files. The heads' matrices are stacked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.limits import LARGEST_HEAD
from neo_desktop.models.linear.packed import TILE_ROWS
from neo_desktop.models.matrices import OF_HEADS, Matrix
from neo_desktop.models.stored_tensor import Blocks, Rows, StoredTensor
from neo_desktop.models.traced.sizes import Change, Latent, stand_in

_EXPAND = "expand_kv"  # method of attention in transformers

# Heads times matrices of their own: x [1, heads, rows, columns] -> [1, heads, rows, width]. `weight` is the
# parameter that has both matrices of every head.
by_head = stand_in(
    "by_head",
    "(Tensor x, Tensor weight, bool is_keys, int width) -> Tensor",
    lambda x, weight, is_keys, width: x.new_empty(*x.shape[:-1], width),
)


def latents_kept(model: nn.Module) -> Iterator[Change]:
    """Yield the changes with which the model's attention hands on latents as keys and values."""
    for module in model.modules():
        if keeps_latent(module):
            yield module, _EXPAND, _latents


def keeps_latent(module: Any) -> bool:
    """Return True for latent attention that kernels support, if it needs less memory than expanded one."""
    if not hasattr(module, _EXPAND) or module.kv_b_proj.bias is not None:
        return False
    if module.kv_lora_rank % TILE_ROWS or module.v_head_dim % TILE_ROWS:  # rows of the heads' matrices
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
    return torch.cat((by_head(own, module.kv_b_proj.weight, True, module.kv_lora_rank), rotated), dim=-1)


def results(module: Any, attended: Tensor) -> Tensor:
    """Return [1, heads, rows, values] from attention's output, [1, heads, rows, rank]."""
    found: Tensor = by_head(attended, module.kv_b_proj.weight, False, module.v_head_dim)
    return found


def latent_sizes(module: Any, names: Mapping[int, str], index: int) -> Latent:
    """Return the sizes of latent attention, from the names of parameters by id."""
    expand, rank = names[id(module.kv_b_proj.weight)], module.kv_lora_rank

    def matrix(kind: str, rows: int, columns: int) -> Matrix:
        return Matrix(f"{index}.{kind}", (f"{expand}.{kind}",), (module.num_heads * rows,), columns)

    keys, values = OF_HEADS
    return Latent(
        expand,
        matrix(keys, rank, module.qk_nope_head_dim),
        matrix(values, module.v_head_dim, rank),
    )


def parts_of_heads(latents: Sequence[Latent], tensors: dict[str, StoredTensor]) -> None:
    """Cut tensors that have both matrices of every head; quantised values stay in the file's type.

    Raise ModelError for another shape.
    """
    for latent in latents:
        whole = tensors.pop(latent.expand, None)
        if whole is None:
            continue
        whole.check([latent.shape], (whole.type_name,))
        for matrix, part in (
            (latent.keys, _keys_in(latent, whole)),
            (latent.values, _values_in(latent, whole)),
        ):
            (name,) = matrix.weights
            tensors[name] = replace(part, name=name)


def _keys_in(latent: Latent, whole: StoredTensor) -> StoredTensor:
    rows, columns = latent.keys.rows, latent.keys.columns
    own = _rows_of_heads(latent)[:, :columns]
    part = whole.part("", (rows, columns), lambda numbers: numbers[own].transpose(1, 2).flatten(0, 1))
    return part if whole.blocks is None else replace(part, type_name=f"{whole.type_name} by columns")


def _values_in(latent: Latent, whole: StoredTensor) -> StoredTensor:
    own, blocks = _rows_of_heads(latent)[:, latent.keys.columns :].flatten(), whole.blocks
    part = whole.part("", (latent.values.rows, latent.values.columns), lambda numbers: numbers[own])
    if blocks is None:
        return part
    return replace(part, blocks=Blocks(blocks.type_name, lambda _: _chosen(blocks, own)))


def _rows_of_heads(latent: Latent) -> Tensor:
    """Return each head's rows: those of keys, then those of values."""
    return torch.arange(latent.shape[0]).view(latent.heads, -1)


def _chosen(blocks: Blocks, rows: Tensor) -> Rows:
    yield 0, torch.cat([raw for _, raw in blocks.pieces(TILE_ROWS)])[rows]
