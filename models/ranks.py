"""Tensor parallelism: a model divided among ranks, which are processes with a device each.

Each rank has some of the heads, with their KV, and a part of the intermediate size of every feed-forward
network or expert. This is Megatron-LM's division; NEO, section 4, divides the CPU-cache in the same way:

    matrix                  rank r of n has
    queries, keys, values   the rows of its heads; ranks share a head if there are fewer KV heads than ranks
    output                  the columns of its heads
    gates, ups              rows r/n to (r + 1)/n, in whole units
    down                    the same columns

`output` and `down` give partial sums; `stages.Stages` reduces them over the ranks. Embedding, norms and
routers are replicated. Only rank 0 has the head, and the biases that are added to sums.
"""

from dataclasses import replace
from math import prod

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import EXPERT_UNIT, expert_names
from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.rank import Rank
from neo_desktop.models.stored_form import StoredForm
from neo_desktop.models.stored_tensor import Rows, StoredTensor
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.weights import Weights


def config_of_rank(config: ModelConfig, rank: Rank) -> ModelConfig:
    """Return the configuration of a rank's part of a model.

    Raises ModelError for a model that cannot be divided among this number of ranks.
    """
    count, experts = rank.count, config.experts
    if count == 1:
        return config
    if isinstance(config, TracedConfig):
        raise ModelError(
            f"{config.architecture} runs by the code of transformers, which --tensor-parallel cannot divide: "
            "leave --tensor-parallel out."
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for what, size, can_be in (
        ("heads", heads, heads % count == 0),
        ("key-value heads", kv_heads, kv_heads % count == 0 or count % kv_heads == 0),
    ):
        if not can_be:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and 0 in (kv_heads % n, n % kv_heads)]
            raise ModelError(
                f"the model's {size} {what} cannot be divided among {count} processes: choose "
                f"--tensor-parallel from {', '.join(map(str, fitting))}."
            )
    inner = rank.inner_part(config.intermediate_size)
    sizes = [inner.stop - inner.start]
    if experts is not None:
        inner = rank.inner_part(experts.intermediate_size, EXPERT_UNIT)
        sizes.append(inner.stop - inner.start)
        experts = replace(experts, intermediate_size=sizes[-1])
    if 0 in sizes:
        raise ModelError(
            f"the model's feed-forward networks are too small to be divided among {count} processes: choose "
            "a smaller number for --tensor-parallel."
        )
    return replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=max(config.num_kv_heads // count, 1),
        intermediate_size=sizes[0],
        experts=experts,
        # Ranks above 0 tie the head to the embedding; they never compute logits.
        tie_word_embeddings=config.tie_word_embeddings or rank.number > 0,
    )


def form_of_rank(form: WeightFormat, config: ModelConfig, rank: Rank) -> WeightFormat:
    """Return the weight format of a rank's part of a model."""
    if not isinstance(form, StoredForm) or rank.count == 1:
        return form
    rank_config = config_of_rank(config, rank)
    whole, part = ({each.name: each.rows for each in of.own_matrices} for of in (config, rank_config))

    def part_of(name: str, parts: tuple[PartShape, ...]) -> tuple[PartShape, ...]:
        rows = part.get(name, whole[name])  # rank 0 alone has the head
        return tuple(replace(shape, rows=shape.rows * rows // whole[name]) for shape in parts)

    return replace(form, stored={name: part_of(name, parts) for name, parts in form.stored.items()})


def weights_of_rank(weights: Weights, config: ModelConfig, rank: Rank) -> Weights:
    """Return a rank's part of a model's weights.

    Raises ModelError for quantised matrices whose columns cannot be divided.
    """
    if rank.count == 1:
        return weights
    parts = _Parts(config, rank)
    tensors = {name: parts.of(name, stored) for name, stored in weights.tensors.items()}
    own = {name: part for name, part in tensors.items() if part is not None}
    return Weights(weights.path, weights.description, own)


class _Parts:
    def __init__(self, config: ModelConfig, rank: Rank) -> None:
        self._rank = rank
        q, kv = (
            slice(part.start * config.head_dim, part.stop * config.head_dim)
            for part in (rank.part(config.num_heads), rank.kv_part(config.num_kv_heads))
        )
        inner = rank.inner_part(config.intermediate_size)
        self._rows = {"self_attn": rank.part(config.num_heads)}  # its only tensor: sinks
        self._rows |= {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        self._rows |= {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        self._columns = {"self_attn.o_proj": q, "mlp.down_proj": inner}
        if config.experts is not None:
            names, experts = expert_names(config.architecture), range(config.experts.count)
            inner = rank.inner_part(config.experts.intermediate_size, EXPERT_UNIT)
            self._rows |= dict.fromkeys(
                (*names.of_each("gate", experts), *names.of_each("up", experts)), inner
            )
            self._columns |= dict.fromkeys(names.of_each("down", experts), inner)

    def of(self, name: str, stored: StoredTensor) -> StoredTensor | None:
        """Return the rank's part of a tensor; None: the rank has no part."""
        if name == "lm_head.weight":
            return stored if self._rank.number == 0 else None
        if not name.startswith("model.layers."):
            return stored
        _, _, _, in_layer = name.split(".", 3)
        module, _, kind = in_layer.rpartition(".")
        if module in self._rows:
            return _part(stored, self._rows[module])
        if module not in self._columns:
            return stored
        if kind == "bias":
            return stored if self._rank.number == 0 else _zeros(stored)
        return _of_columns(name, stored, self._columns[module], self._rank)


def _of_columns(name: str, stored: StoredTensor, columns: slice, rank: Rank) -> StoredTensor:
    if stored.blocks is not None:
        elements = BY_NAME[stored.blocks.type_name].elements
        if columns.start % elements or columns.stop % elements:
            raise ModelError(
                f"{name} in {stored.file} has blocks of {elements} numbers ({stored.type_name}), which "
                f"a part of its columns, from {columns.start} to {columns.stop}, would cut: it cannot be "
                f"divided among {rank.count} processes."
            )
    return _part(stored, slice(0, stored.shape[0]), columns)


def _zeros(bias: StoredTensor) -> StoredTensor:
    """Return zeros in place of a bias that rank 0 adds."""
    return replace(bias, pieces=lambda: iter([(0, torch.zeros(bias.shape))]))


def _part(whole: StoredTensor, rows: slice, columns: slice | None = None) -> StoredTensor:
    """Return consecutive rows and columns of a tensor."""
    widths = whole.shape[1:] if columns is None else (columns.stop - columns.start,)
    shape = (rows.stop - rows.start, *widths)
    blocks = whole.blocks
    if blocks is not None:
        kind, nbytes = BY_NAME[blocks.type_name], columns
        if columns is not None:
            ends = (end // kind.elements * kind.nbytes for end in (columns.start, columns.stop))
            nbytes = slice(*ends)
        of_whole = blocks.pieces
        blocks = replace(blocks, pieces=lambda unit: _cut(of_whole(unit), rows, nbytes))
    return replace(
        whole,
        shape=shape,
        nbytes=whole.nbytes * prod(shape) // prod(whole.shape),
        pieces=lambda: _cut(whole.pieces(), rows, columns),
        blocks=blocks,
    )


def _cut(pieces: Rows, rows: slice, columns: slice | None) -> Rows:
    """Yield a part in one piece: its rows need not start at a piece's."""
    parts = []
    for first, piece in pieces:
        if first >= rows.stop:
            break
        own = piece[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        parts.append(own if columns is None else own[:, columns])
    yield 0, torch.cat(parts)
