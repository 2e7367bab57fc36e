"""The weights of a decoder, one class for all supported families: they differ by flags of the configuration.

`stages` has the computation.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby

import torch
from torch import Tensor

from neo_desktop.models.config import FINAL_NORM, ModelConfig
from neo_desktop.models.expert_slots import LayerSlots, expert_slots
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import Embedding, Linear, WeightFormat
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.matrices import Matrix


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
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    sinks: Tensor | None  # [heads]: per head, the score of one more key whose value is zero
    output: Linear  # [hidden, heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    mlp: GatedMLP | Experts

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.output)
        yield from (getattr(self.mlp, field.name) for field in fields(self.mlp))


TURN = ("output", "gate_up", "down", "qkv")
"""The matrices between the attention of two layers, in order. The last one belongs to the next layer."""


def _made(form: WeightFormat, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> Linear:
    rows, columns = matrix.rows, matrix.columns
    if matrix.is_table:
        return form.table(rows, columns, dtype, device)
    return form.empty(rows, columns, has_bias=bool(matrix.biases), dtype=dtype, device=device)


class Decoder:
    """A decoder-only transformer on one device and in one dtype; filled by `weights.named_weights`.

    Args:
        form: storage format of the matrices.
        main: has the matrices that are not `own_matrices`; None: the decoder has its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightFormat = DENSE,
        main: "Decoder | None" = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        wide = config.wide_tensors
        self.tensors = {
            name: torch.empty(shape, dtype=torch.float32 if name in wide else dtype, device=device)
            for name, shape in config.tensors.items()
        }
        """The weights outside matrices, under their names in checkpoints."""
        shared: dict[str, Linear] = {}
        if main is not None:
            shared = {"embedding": main.embedding, "head": main.lm_head}
        for matrix in config.own_matrices:
            shared.pop(matrix.name, None)
        self.matrices: dict[str, Linear] = {
            matrix.name: shared[matrix.name]
            if matrix.name in shared
            else _made(form.named(matrix.name), matrix, dtype, device)
            for matrix in config.all_matrices
        }
        """The matrices under the names of `WeightFormat.named`."""
        embedding = self.matrices["embedding"]
        assert isinstance(embedding, Embedding)
        self.embedding: Embedding = embedding
        self.lm_head: Linear = self.matrices.get("head", embedding)  # a tied head is the same object
        self.streamed_shares = UNMEASURED  # shares of offloaded matrices; replaced after profiling
        self.streamed_experts = UNMEASURED  # the same for experts in host memory
        moves = form.moves if isinstance(form, OffloadedFormat) else None
        experts = config.experts
        self.expert_slots = (
            None if experts is None else expert_slots(self._mixtures(), experts.count, moves, device)
        )
        """None: no experts move."""
        self._gather()

    def _mixtures(self) -> Iterator[tuple[Linear, Linear, Linear]]:
        """Yield each layer's gates, ups and downs; gates and ups may be one matrix."""
        of_experts = (matrix.name for matrix in self.config.all_matrices if matrix.experts)
        for _, names in groupby(of_experts, lambda name: name.partition(".")[0]):
            of_layer = [self.matrices[name] for name in names]
            yield of_layer[0], of_layer[-2], of_layer[-1]

    def slots_of(self, gate: Linear) -> LayerSlots | None:
        """Return the slots of the layer with these gates; None: its experts do not move."""
        return None if self.expert_slots is None else self.expert_slots.of(gate)

    def _gather(self) -> None:
        config = self.config
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.final_norm = self.tensors[FINAL_NORM]
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(self.device)

    def _layer(self, index: int) -> LayerWeights:
        tensors, matrices, prefix = self.tensors, self.matrices, f"model.layers.{index}."

        def mlp(*names: str) -> list[Linear]:
            return [matrices[f"{index}.{name}"] for name in names]

        return LayerWeights(
            input_norm=tensors[f"{prefix}input_layernorm.weight"],
            qkv=matrices[f"{index}.qkv"],
            q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
            k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
            sinks=tensors.get(f"{prefix}self_attn.sinks"),
            output=matrices[f"{index}.output"],
            post_attention_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
            mlp=GatedMLP(*mlp("gate_up", "down"))
            if f"{index}.down" in matrices
            else Experts(*mlp("router", "experts_gate", "experts_up", "experts_down")),
        )

    def memory(self) -> dict[torch.device, int]:
        """Return the bytes of the weights per device."""
        memory = Counter({self.device: sum(tensor.nbytes for tensor in self.tensors.values())})
        for linear in dict.fromkeys(self.matrices.values()):
            memory.update(linear.memory())
        return dict(memory)

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
