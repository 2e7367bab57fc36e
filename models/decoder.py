"""The weights of a decoder, one class for all supported families: they differ by flags of the configuration.

`stages` has the computation.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.expert_slots import ExpertSlots, expert_slots
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import Embedding, Linear, WeightFormat
from neo_desktop.models.linear.shares import UNMEASURED


@dataclass(slots=True)
class GatedMLP:
    """Weights of a feed-forward network."""

    gate_up: Linear  # [2 * intermediate, hidden]: gates, then ups
    down: Linear  # [hidden, intermediate]


@dataclass(slots=True)
class Experts:
    """Weights of a mixture of experts; the router selects experts for each token.

    The matrices of a layer's experts are stacked in one, which is loaded like any other matrix.
    """

    router: Linear  # [experts, hidden]
    gate: Linear  # [experts * intermediate, hidden]
    up: Linear  # [experts * intermediate, hidden]
    down: Linear  # [experts * hidden, intermediate]


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, all in the model's dtype; matrices are `[out, in]`."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: a row per head; one norm covers q and k
    sinks: Tensor | None  # [heads]: per head, the score of one more key whose value is zero
    output: Linear  # [hidden, heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    mlp: GatedMLP | Experts

    def linears(self) -> Iterator[Linear]:
        """Yield the matrices."""
        yield from (self.qkv, self.output)
        yield from (getattr(self.mlp, field.name) for field in fields(self.mlp))


TURN = ("output", "gate_up", "down", "qkv")
"""The matrices between the attention of two layers, in order. The last one belongs to the next layer."""


def empty_embedding(
    form: WeightFormat, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Embedding:
    """Return an embedding to be loaded; a tied head is the same object."""
    embedding = form.named("embedding").empty(rows, columns, has_bias=False, dtype=dtype, device=device)
    assert isinstance(embedding, Embedding)
    return embedding


class Decoder:
    """A decoder-only transformer on one device and in one dtype; filled by `weights.named_weights`.

    Args:
        form: storage format of the matrices.
    """

    expert_slots: ExpertSlots | None = None  # None: no experts move

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightFormat = DENSE,
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.matrices: dict[str, Linear] = {}
        """The matrices under the names of `WeightFormat.named`."""
        matrices = config.matrices

        def linear(name: str, layer: int | None = None) -> Linear:
            matrix = matrices[name]
            full_name = name if layer is None else f"{layer}.{name}"
            made = form.named(full_name).empty(
                matrix.rows, matrix.columns, has_bias=matrix.has_bias, dtype=dtype, device=device
            )
            self.matrices[full_name] = made
            return made

        def mlp(layer: int) -> GatedMLP | Experts:
            if config.experts is None or layer not in config.experts.layers:
                return GatedMLP(linear("gate_up", layer), linear("down", layer))
            names = ("router", "experts_gate", "experts_up", "experts_down")
            return Experts(*(linear(name, layer) for name in names))

        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = empty_embedding(form, config.vocab_size, config.hidden_size, dtype, device)
        self.matrices["embedding"] = self.embedding
        normed_heads = config.num_heads + config.num_kv_heads
        self.layers = [
            LayerWeights(
                input_norm=empty(config.hidden_size),
                qkv=linear("qkv", index),
                qk_norm=empty(normed_heads, config.head_dim) if config.qk_norm else None,
                sinks=empty(config.num_heads) if config.attention_sinks else None,
                output=linear("output", index),
                post_attention_norm=empty(config.hidden_size),
                mlp=mlp(index),
            )
            for index in range(config.num_layers)
        ]
        self.final_norm = empty(config.hidden_size)
        self.lm_head: Linear = self.embedding if config.tie_word_embeddings else linear("head")
        self.streamed_shares = UNMEASURED  # shares of offloaded matrices; replaced after profiling
        self.streamed_experts = UNMEASURED  # the same for experts in host memory
        moves = form.moves if isinstance(form, OffloadedFormat) else None
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        stacks = [(each.gate, each.up, each.down) for each in mixtures]
        count = 0 if config.experts is None else config.experts.count
        self.expert_slots = expert_slots(stacks, count, moves, device)
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)

    def memory(self) -> dict[torch.device, int]:
        """Return the bytes of the weights per device."""
        memory = Counter({self.device: sum(tensor.nbytes for tensor in self._others())})
        for linear in dict.fromkeys((self.embedding, *self.linears())):
            memory.update(linear.memory())
        return dict(memory)

    def _others(self) -> Iterator[Tensor]:
        """Yield the weights outside linear layers."""
        yield self.final_norm
        for weights in self.layers:
            yield from (weights.input_norm, weights.post_attention_norm)
            yield from (tensor for tensor in (weights.qk_norm, weights.sinks) if tensor is not None)

    @property
    def sinks(self) -> list[Tensor] | None:
        """Attention sinks of the layers; None: the model has none."""
        sinks = [weights.sinks for weights in self.layers if weights.sinks is not None]
        return sinks or None

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """Write the embeddings of tokens `[n]` to `out` `[n, hidden]`."""
        self.embedding.look_up(token_ids, out)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on all devices."""
        return sum(self.memory().values())

    @property
    def has_splits(self) -> bool:
        """True if some matrices are partly in host memory."""
        return any(isinstance(linear, OffloadedLinear) for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        """Yield all matrices of linear layers, the head included."""
        for weights in self.layers:
            yield from weights.linears()
        yield self.lm_head
