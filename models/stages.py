"""A decoder's arithmetic as stages in preallocated memory, for any mix of prefill chunks and decodes.

An iteration over a sub-batch of n tokens, from any requests:

    stages.embed(token_ids, positions, state)
    for layer in range(config.num_layers):
        stages.advance(layer - 1 if layer else None, layer, state)
        ...                            # the caller attends: `stages.heads(state)` -> state.attention
    stages.advance(layer, None, state)
    stages.final_norm(state, normed)
    logits = stages.logits(normed, room)

Between stages, `residual + x` are the hidden states: the next normalisation adds the two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models import native_operators
from neo_desktop.models import operators as in_torch
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import TURN, Decoder, Experts
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.moe import MoE, moe_layers
from neo_desktop.models.operators import Operators, Store, rotation
from neo_desktop.models.packed_layers import MAX_ROWS, PackedLayers
from neo_desktop.models.recurrent import RecurrentBatch

Reduce = Callable[[Tensor], object]
"""All-reduce: replaces each rank's tensor by the sum over all ranks; see `models.ranks`."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Scratch memory within a stage; states of a device share it, because stages run one after the other."""

    normed: Tensor  # [rows, hidden]
    gate_up: Tensor  # [rows, 2 * intermediate]
    gated: Tensor  # [rows, intermediate]
    experts: ExpertScratch | None = None  # None: a dense model

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> "Scratch":
        """Allocate uninitialised memory for `rows` tokens."""
        intermediate = config.intermediate_size if "gate_up" in config.matrices else 0

        def room(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        experts = ExpertScratch.empty(config, rows, dtype, device)
        return cls(room(config.hidden_size), room(2 * intermediate), room(intermediate), experts)

    def first(self, rows: int) -> "Scratch":
        """Return views of the first rows."""
        experts = None if self.experts is None else self.experts.first(rows)
        return Scratch(self.normed[:rows], self.gate_up[:rows], self.gated[:rows], experts)


@dataclass(slots=True)
class State:
    """The tensors that the stages of one sub-batch pass on, in the model's dtype unless noted.

    A stage may replace `x` and `qkv` by other tensors if a matmul cannot write to given memory
    (`Stages.writes_in_place`).
    """

    residual: Tensor  # [rows, hidden]
    x: Tensor  # [rows, hidden]: the next normalisation adds it to the residual
    qkv: Tensor  # [rows, (heads + 2 * kv_heads) * head_dim]
    attention: Tensor  # [rows, heads, head_dim]: output of the attention
    cos: Tensor  # [rows, 1, head_dim] float32; see `operators.rotation`
    sin: Tensor
    scratch: Scratch
    recurrent: RecurrentBatch | None = None  # None: a model without recurrent layers, or fresh states
    _seen: list[native.View] | None = field(default=None, compare=False)  # see `seen_by_native`

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, scratch: Scratch
    ) -> "State":
        """Allocate uninitialised memory for `rows` tokens.

        Args:
            scratch: of at least as many rows.
        """

        def room(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=of, device=device)

        return cls(
            residual=room(config.carried_width),
            x=room(config.hidden_size),
            qkv=room(config.qkv_rows),
            attention=room(config.num_heads, config.head_dim),
            cos=room(1, config.rotation_width, of=torch.float32),
            sin=room(1, config.rotation_width, of=torch.float32),
            scratch=scratch.first(rows),
        )

    @property
    def rows(self) -> int:
        """Number of tokens."""
        return len(self.residual)

    def seen_by_native(self) -> list[native.View]:
        """Return the buffers of native row programs, see `given_rows`, each [rows, width]."""
        if self._seen is None:
            row_buffers = self.attention.flatten(1), self.cos[:, 0], self.sin[:, 0]
            tensors = (self.residual, self.x, self.qkv, *row_buffers)
            self._seen = [native.view_of("rows", tensor) for tensor in tensors]
        return self._seen

    def first(self, rows: int) -> "State":
        x, qkv, attention, scratch = self.x[:rows], self.qkv[:rows], self.attention[:rows], self.scratch
        angles = self.cos[:rows], self.sin[:rows]
        return State(self.residual[:rows], x, qkv, attention, *angles, scratch.first(rows))

    def select(self, rows: Tensor, into: "State", first_row: int) -> None:
        """Copy some rows of the tensors that later stages read.

        Args:
            rows: [m] int64
            into: destination; must not share memory with this state.
            first_row: of the destination.
        """
        target = slice(first_row, first_row + len(rows))
        torch.index_select(self.residual, 0, rows, out=into.residual[target])
        torch.index_select(self.attention, 0, rows, out=into.attention[target])


@dataclass(frozen=True, slots=True)
class Product:
    """A matmul with an offloaded matrix; the caller computes its parts, overlapped."""

    name: str  # one of `TURN`
    layer: int
    linear: OffloadedLinear
    x: Tensor  # [n, columns], contiguous
    out: Tensor  # [n, rows]


@dataclass(frozen=True, slots=True)
class Sum:
    """An all-reduce of `x`, in place."""

    reduce: Reduce
    x: Tensor

    def __call__(self) -> None:
        """Compute it, together with the other ranks."""
        self.reduce(self.x)


@dataclass(frozen=True, slots=True)
class Step:
    """Work up to an offloaded matmul or all-reduce, and that operation; None: absent."""

    work: Callable[[], object] | None
    product: "Product | DividedExperts | Sum | None"


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """A layer's experts that are partly in host memory, and the rows routed to them."""

    moe: MoE
    x: Tensor  # [rows, hidden]: reusable after the device's experts have read it
    room: ExpertScratch  # has the routing
    out: Tensor  # [rows, hidden]


class Stages:
    """The stages of a decoder.

    Args:
        decoder: has the weights.
        operators: between matmuls; None: native kernels on a CPU, torch's operators elsewhere.
        reduce: all-reduce for a decoder that is one rank's part; None: the decoder is whole.
        has_head: this part has the head.
    """

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
        self._operators = operators or (native_operators if decoder.device.type == "cpu" else in_torch)
        self._eps = decoder.config.rms_norm_eps
        is_native = operators is None and reduce is None and decoder.device.type == "cpu"
        self._layers = PackedLayers.of(decoder) if is_native else None
        self.moe_layers = moe_layers(decoder, self._operators)  # by layer

    @property
    def is_part(self) -> bool:
        """True if other ranks hold the other parts of the model; all ranks must then run the same stages."""
        return self._reduce is not None

    @property
    def ends_with_states(self) -> bool:
        """True if a recurrent layer follows the last attention."""
        return False

    @property
    def writes_in_place(self) -> bool:
        """True if stages write only to the given memory, as CUDA graphs require."""
        return all(linear.writes_in_place for linear in self.decoder.linears())

    @property
    def offloaded_matrices(self) -> dict[tuple[int, str], OffloadedLinear]:
        """The offloaded matrices, by layer boundary and by name in `TURN`.

        Boundary i is between the attention of layers i - 1 and i: it ends one layer and starts the next. Its
        matmuls follow the order of `TURN`.
        """
        linears = {
            (layer + (name != "qkv"), name): weights.linear(name)
            for layer, weights in enumerate(self.decoder.layers)
            for name in TURN
        }
        return {place: linear for place, linear in linears.items() if isinstance(linear, OffloadedLinear)}

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:
        """Start an iteration: embed the tokens [rows], and compute RoPE for their positions [rows]."""
        self.decoder.embed(token_ids, state.residual)
        state.x.zero_()
        self.rotate(positions, state.cos, state.sin)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Compute RoPE's cos and sin for positions; see `operators.rotation`."""
        factor = self.config.rope.attention_factor
        rotation(positions, self.decoder.inverse_frequencies, factor, cos, sin)

    def advance(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> None:
        """Compute layer `finished` after its attention, then layer `begun` up to its attention.

        Args:
            finished: None: no layer.
            begun: None: no layer.
            state: `state.attention` holds the attention's output of layer `finished`.
            store: destination of layer `begun`'s keys and values; None: they stay in the state.
        """
        if self._layers is not None and store is None and state.rows <= MAX_ROWS:
            self._layers.advance(finished, begun, state.seen_by_native())
            return
        if finished is not None:
            self.post_attention(finished, state)
        if begun is not None:
            self.pre_attention(begun, state, store)

    def steps(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> Iterator[Step]:
        """Yield the arithmetic of `advance`, cut at offloaded matmuls and at all-reduces.

        The caller runs a step's work, then its matmul or all-reduce, one step after the other. All matmuls
        must write in place.
        """
        work: list[Callable[[], object]] = []
        if finished is not None:
            scratch = state.scratch
            yield from self._cut(work, "output", finished, state.attention.flatten(1), state.x)
            yield from self._cut_at_sum(work, state)
            moe = self.moe_layers.get(finished)
            if moe is not None and moe.on_host is not None:
                assert scratch.experts is not None
                work.append(partial(self._norm_for_mlp, finished, state))
                work.append(partial(moe.route, scratch.normed, scratch.experts))
                experts = DividedExperts(moe, scratch.normed, scratch.experts, state.x)
                yield Step(partial(_run, tuple(work)), experts)
                work.clear()
            elif moe is not None:
                work.append(partial(self._mlp, finished, state))
            else:
                work.append(partial(self._norm_for_mlp, finished, state))
                yield from self._cut(work, "gate_up", finished, scratch.normed, scratch.gate_up)
                work.append(partial(self._operators.silu_mul, scratch.gate_up, scratch.gated))
                yield from self._cut(work, "down", finished, scratch.gated, state.x)
            yield from self._cut_at_sum(work, state)
        if begun is not None:
            work.append(partial(self._norm_for_attention, begun, state))
            yield from self._cut(work, "qkv", begun, state.scratch.normed, state.qkv)
            work.append(partial(self._rotate_heads, begun, state, store))
        if work:
            yield Step(partial(_run, tuple(work)), None)

    def _cut(
        self, work: list[Callable[[], object]], name: str, layer: int, x: Tensor, out: Tensor
    ) -> Iterator[Step]:
        """Yield the work before an offloaded matmul; append any other matmul to the work."""
        linear = self.decoder.layers[layer].linear(name)
        if isinstance(linear, OffloadedLinear):
            yield Step(partial(_run, tuple(work)) if work else None, Product(name, layer, linear, x, out))
            work.clear()
        elif linear is not None:
            work.append(partial(linear.multiply, x, out))

    def _cut_at_sum(self, work: list[Callable[[], object]], state: State) -> Iterator[Step]:
        if self._reduce is not None:
            yield Step(partial(_run, tuple(work)), Sum(self._reduce, state.x))
            work.clear()

    def pre_attention(self, layer: int, state: State, store: Store | None = None) -> None:
        """Compute queries, keys and values; with `store`, write keys and values to a cache."""
        self._norm_for_attention(layer, state)
        state.qkv = self.decoder.layers[layer].qkv.multiply(state.scratch.normed, state.qkv)
        self._rotate_heads(layer, state, store)

    def _norm_for_attention(self, layer: int, state: State) -> None:
        norm = self.decoder.layers[layer].input_norm
        self._operators.add_rms_norm(state.x, state.residual, norm, self._eps, state.scratch.normed)

    def _rotate_heads(self, layer: int, state: State, store: Store | None) -> None:
        rest = self.decoder.layers[layer].qk_norm, self._eps
        if store is None:
            self._operators.rope(state.qkv, state.cos, state.sin, self.config.num_kv_heads, *rest)
        else:
            self._operators.rope_append(state.qkv, state.cos, state.sin, *store, *rest)

    def heads(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim], as views.

        The heads of one token are contiguous, the tokens strided.
        """
        config = self.config
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        end = config.num_heads + config.num_kv_heads
        return heads[:, : config.num_heads], heads[:, config.num_heads : end], heads[:, end:]

    def keys_values(self, state: State) -> Tensor:
        """Return keys and values [2, rows, kv_heads, head_dim], as a view."""
        config = self.config
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        return torch.unflatten(heads[:, config.num_heads :], 1, (2, config.num_kv_heads)).transpose(0, 1)

    def post_attention(self, layer: int, state: State) -> None:
        """Compute the layer after its attention, whose output is in `state.attention`."""
        self.attention_out(layer, state)
        self.mlp(layer, state)

    def attention_out(self, layer: int, state: State) -> None:
        """Compute the attention's output projection."""
        state.x = self.decoder.layers[layer].output.multiply(state.attention.flatten(1), state.x)
        if self._reduce is not None:
            self._reduce(state.x)

    def mlp(self, layer: int, state: State) -> None:
        """Compute the feed-forward network, or the experts."""
        self._mlp(layer, state)
        if self._reduce is not None:
            self._reduce(state.x)

    def _mlp(self, layer: int, state: State) -> None:
        weights, scratch = self.decoder.layers[layer], state.scratch
        self._norm_for_mlp(layer, state)
        if isinstance(weights.mlp, Experts):
            assert scratch.experts is not None
            self.moe_layers[layer].apply(scratch.normed, scratch.experts, state.x)
        else:
            gate_up = weights.mlp.gate_up.multiply(scratch.normed, scratch.gate_up)
            self._operators.silu_mul(gate_up, scratch.gated)
            state.x = weights.mlp.down.multiply(scratch.gated, state.x)

    def _norm_for_mlp(self, layer: int, state: State) -> None:
        norm = self.decoder.layers[layer].post_attention_norm
        self._operators.add_rms_norm(state.x, state.residual, norm, self._eps, state.scratch.normed)

    def final_norm(self, state: State, out: Tensor) -> None:
        """Write the input of the head, which is also a text's embedding, to `out` [rows, hidden]."""
        self._operators.add_rms_norm(state.x, state.residual, self.decoder.final_norm, self._eps, out)

    def logits(self, normed: Tensor, out: Tensor) -> Tensor:
        """Return scores [m, vocab] of the next token, in `out` if it can be written.

        Args:
            normed: [m, hidden], from `final_norm`.
            out: [m, vocab]
        """
        return self.decoder.lm_head.multiply(normed, out)


def _run(work: tuple[Callable[[], object], ...]) -> None:
    for item in work:
        item()
