"""A decoder's arithmetic as stages in preallocated memory, for any mix of prefill chunks and decodes.

Stage i is the work between the attention of layers i - 1 and i: it ends one layer and begins the next one. An
iteration over a sub-batch of n tokens, from any requests:

    stages.embed(token_ids, positions, state)
    for layer in range(config.num_layers):
        stages.advance(layer, state)
        ...                            # the caller attends: `stages.heads(state)` -> state.attention
    stages.advance(config.num_layers, state)
    stages.final_norm(state, normed)
    logits = stages.logits(normed, room)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.models import native_operators
from neo_desktop.models import operators as in_torch
from neo_desktop.models.attention import heads_of, specs_of
from neo_desktop.models.decoder import TURN, Decoder, GatedMLP, LayerWeights
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.moe import MoE, moe_layers
from neo_desktop.models.operators import Operators, Store, rotation
from neo_desktop.models.ops import (
    EXPERTS,
    MAX_ROWS,
    Cut,
    Op,
    Reduce,
    add_norm,
    all_reduce,
    experts,
    gate,
    matmul,
    rotate,
    row_stage,
)
from neo_desktop.models.state import State


@dataclass(frozen=True, slots=True)
class Step:
    """Work up to an operation that the engine carries out, and that operation; None: absent."""

    work: Callable[[], object] | None
    cut: Cut | None


class Stages:
    """The stages of a decoder.

    Args:
        operators: between matmuls; None: native kernels on a CPU, torch's operators elsewhere.
        reduce: all-reduce for a decoder that is one rank's part; None: the decoder is whole.
        has_head: this part has the head.
    """

    turn: tuple[str, ...] = (TURN[0], EXPERTS, *TURN[1:])
    """Names of the cuts of a turn that the CPU takes part in, in order; see `offloaded_matrices`."""
    ends_with_states = False  # True if a recurrent layer follows the last attention

    def __init__(
        self,
        decoder: Decoder,
        operators: Operators | None = None,
        reduce: Reduce | None = None,
        *,
        has_head: bool = True,
    ) -> None:
        if reduce is not None and decoder.has_splits:
            raise ValueError("weight offloading is not supported with tensor parallelism")
        self.decoder = decoder
        self._reduce = reduce
        self.has_head = has_head
        self.config = decoder.config
        self.attention = specs_of(decoder.config, decoder.sinks)  # by layer
        self._operators = operators or (native_operators if decoder.device.type == "cpu" else in_torch)
        self._moe_layers = moe_layers(decoder, self._operators)  # by layer
        self._ops = [self._stage(index) for index in range(self.config.num_layers + 1)]
        is_native = operators is None and reduce is None and decoder.device.type == "cpu"
        rows = [row_stage(ops, self.config, decoder.dtype) for ops in self._ops] if is_native else []
        self._rows = {index: stage for index, stage in enumerate(rows) if stage is not None}
        """Stage index -> its row programs."""

    @property
    def is_part(self) -> bool:
        """True if other ranks hold the other parts of the model; all ranks must then run the same stages."""
        return self._reduce is not None

    @property
    def offloaded_matrices(self) -> dict[tuple[int, str], OffloadedLinear]:
        """The offloaded matrices, by stage and by name in `turn`, in the order of their use."""
        return {
            (index, op.offloaded[0]): op.offloaded[1]
            for index, ops in enumerate(self._ops)
            for op in ops
            if op.offloaded is not None
        }

    @property
    def divided_experts(self) -> dict[tuple[int, str], MoE]:
        """The MoE layers with experts in host memory, by stage and by name in `turn`, in order."""
        layers = self._moe_layers.items()
        return {(layer + 1, EXPERTS): moe for layer, moe in layers if moe.on_host is not None}

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:
        """Start an iteration: embed the tokens [rows], and compute RoPE for their positions [rows]."""
        self.decoder.embed(token_ids, state.residual)
        state.x.zero_()
        self.rotate(positions, state.cos, state.sin)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Compute RoPE's cos and sin for positions; see `operators.rotation`."""
        factor = self.config.rope.attention_factor
        rotation(positions, self.decoder.inverse_frequencies, factor, cos, sin)

    def advance(self, index: int, state: State, store: Store | None = None) -> None:
        """Compute a stage, whose input is the attention's output in `state.attention`.

        Without a store, the layer's keys and values stay in the state.
        """
        if index in self._rows and store is None and state.rows <= MAX_ROWS:
            self._rows[index].run(state, None)
            return
        for op in self._ops[index]:
            op.run(state, store)

    def steps(self, index: int, state: State, store: Store | None = None) -> Iterator[Step]:
        """Yield the operations of `advance`, cut at those that the engine carries out itself.

        The caller runs a step's work, then carries out its cut, one step after the other.
        """
        work: list[Callable[[], object]] = []
        for op in self._ops[index]:
            if op.cut is None:
                work.append(partial(op.run, state, store))
            else:
                yield Step(partial(_run, tuple(work)) if work else None, op.cut(state))
                work.clear()
        if work:
            yield Step(partial(_run, tuple(work)), None)

    def _stage(self, index: int) -> list[Op]:
        ops: list[Op] = []
        operators, config, layers = self._operators, self.config, self.decoder.layers
        norm = partial(add_norm, operators, eps=config.rms_norm_eps)
        sums = [] if self._reduce is None else [all_reduce(self._reduce)]
        if index > 0:
            layer = layers[index - 1]
            ops += [matmul("output", layer.output, "attention", "x"), *sums]
            ops += [norm(layer.post_attention_norm)]
            if isinstance(layer.mlp, GatedMLP):
                ops += [
                    matmul("gate_up", layer.mlp.gate_up, "scratch.normed", "scratch.gate_up"),
                    gate(operators, config.intermediate_size),
                    matmul("down", layer.mlp.down, "scratch.gated", "x"),
                ]
            else:
                ops += experts(self._moe_layers[index - 1])
            ops += sums
        if index < config.num_layers:
            layer = layers[index]
            ops += [norm(layer.input_norm), matmul("qkv", layer.qkv, "scratch.normed", "qkv")]
            ops += [rotate(operators, config, self._qk_norm(layer))]
        return ops

    def _qk_norm(self, layer: LayerWeights) -> Tensor | None:
        """Return the norm's weights, [heads + kv_heads, head_dim]: one norm covers queries and keys."""
        if layer.q_norm is None or layer.k_norm is None:
            return None
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        return torch.cat((layer.q_norm.expand(heads, -1), layer.k_norm.expand(kv_heads, -1)))

    def heads(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim], as views.

        The heads of one token are contiguous, the tokens strided.
        """
        config = self.config
        qkv = state.qkv.view(len(state.qkv), -1, config.head_dim)
        return heads_of(qkv, config.num_heads, config.num_kv_heads)

    def keys_values(self, state: State) -> Tensor:
        """Return keys and values [kv_parts, rows, kv_heads, head_dim], as a view."""
        config = self.config
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        parts = torch.unflatten(heads[:, config.num_heads :], 1, (config.kv_parts, config.num_kv_heads))
        return parts.transpose(0, 1)

    def final_norm(self, state: State, out: Tensor) -> None:
        """Write the input of the head, which is also a text's embedding, to `out` [rows, hidden]."""
        eps = self.config.rms_norm_eps
        self._operators.add_rms_norm(state.x, state.residual, self.decoder.final_norm, eps, out)

    def choose(self, logits: Tensor, out: Tensor) -> None:
        self._operators.choose_tokens(logits, out)

    def logits(self, normed: Tensor, out: Tensor) -> Tensor:
        """Write scores [m, vocab] of the next token to `out`, and return them; normed: from `final_norm`."""
        return self.decoder.lm_head.multiply(normed, out)


def _run(work: tuple[Callable[[], object], ...]) -> None:
    for item in work:
        item()
