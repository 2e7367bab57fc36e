"""The operations of a stage: a layer's arithmetic, written once.

A stage is the work between the attention of two layers, as a list of operations on the buffers of a `State`.
The list has three readers: `Stages.advance` runs it, `Stages.steps` cuts it at the operations that the engine
carries out itself, and `row_program` compiles it for a CPU to one native call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.moe import MoE
from neo_desktop.models.operators import Operators, Store
from neo_desktop.models.state import ATTENTION, COS, GIVEN, QKV, RESIDUAL, SIN, State, X, given_buffers
from neo_desktop.native import Columns, RowProgram

MAX_ROWS = 32  # of a row program: their quantised form fits a core's caches; more rows gain nothing

Reduce = Callable[[Tensor], object]
"""All-reduce: replaces each rank's tensor by the sum over all ranks; see `models.ranks`."""

COLUMNS = {
    "residual": Columns(RESIDUAL),
    "x": Columns(X),
    "qkv": Columns(QKV),
    "attention": Columns(ATTENTION),
    "scratch.normed": Columns(len(GIVEN)),
    "scratch.gate_up": Columns(len(GIVEN) + 1),
    "scratch.gated": Columns(len(GIVEN) + 2),
}
"""The buffers of row programs, by their names in a state."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matmul with an offloaded matrix."""

    name: str  # one of `TURN`
    linear: OffloadedLinear
    x: Tensor  # [n, columns], contiguous
    out: Tensor  # [n, rows]


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """A layer's experts that are partly in host memory, and the rows routed to them."""

    moe: MoE
    x: Tensor  # [rows, hidden]: reusable after the device's experts have read it
    room: ExpertScratch  # has the routing
    out: Tensor  # [rows, hidden]


Cut = Product | DividedExperts | Callable[[], object]
"""What the engine carries out: overlapped parts, or an all-reduce between graphs."""


class Op(ABC):
    """An operation on a state's buffers."""

    @abstractmethod
    def run(self, state: State, store: Store | None) -> None:
        """Compute it; `store`: target of keys and values."""

    def cut(self, state: State) -> Cut | None:
        """Return what the engine carries out instead of `run`; None: nothing."""
        return None

    def row_step(self) -> native.Step | None:
        """Return the operation as a step of a row program; None: it has none."""
        return None


class Matmul(Op):
    """`out = x @ weight.T + bias`.

    Args:
        name: one of `TURN`.
        x: name of the input in a state.
        out: name of the output.
    """

    def __init__(self, name: str, linear: Linear, x: str, out: str) -> None:
        self.name, self.linear = name, linear
        self._columns = COLUMNS[x], COLUMNS[out]
        self._x, self._out = attrgetter(x), attrgetter(out)

    def run(self, state: State, store: Store | None) -> None:
        self.linear.multiply(self._x(state).flatten(1), self._out(state))

    def cut(self, state: State) -> Cut | None:
        if not isinstance(self.linear, OffloadedLinear):
            return None
        return Product(self.name, self.linear, self._x(state).flatten(1), self._out(state))

    def row_step(self) -> native.Step | None:
        if not isinstance(self.linear, PackedMatrix):
            return None
        (x, out), matrix = self._columns, self.linear
        return native.Step(
            "multiply", (x,), out, matrix.rows, groups=matrix.packed_parts[0].columns, matrix=matrix.native
        )


@dataclass(frozen=True, slots=True)
class AddNorm(Op):
    """`residual += x`, then RMSNorm of the sum."""

    operators: Operators
    weight: Tensor
    eps: float

    def run(self, state: State, store: Store | None) -> None:
        self.operators.add_rms_norm(state.x, state.residual, self.weight, self.eps, state.scratch.normed)

    def row_step(self) -> native.Step:
        sources, into = (COLUMNS["residual"], COLUMNS["x"]), COLUMNS["scratch.normed"]
        return native.Step(
            "add_rms_norm", sources, into, len(self.weight), number=self.eps, weights=(self.weight,)
        )


@dataclass(frozen=True, slots=True)
class Gate(Op):
    """SwiGLU's activation."""

    operators: Operators
    width: int

    def run(self, state: State, store: Store | None) -> None:
        self.operators.silu_mul(state.scratch.gate_up, state.scratch.gated)

    def row_step(self) -> native.Step:
        return native.Step("silu_mul", (COLUMNS["scratch.gate_up"],), COLUMNS["scratch.gated"], self.width)


@dataclass(frozen=True, slots=True)
class Rotate(Op):
    """RoPE of queries and keys; with `store`, keys and values go to a cache."""

    operators: Operators
    config: ModelConfig
    norm: Tensor | None  # of queries and keys, see `operators.rope_append`

    def run(self, state: State, store: Store | None) -> None:
        norm, config = (self.norm, self.config.rms_norm_eps), self.config
        if store is None:
            self.operators.rope(state.qkv, state.cos, state.sin, config.num_kv_heads, *norm)
        else:
            self.operators.rope_append(state.qkv, state.cos, state.sin, *store, *norm)

    def row_step(self) -> native.Step:
        config, width = self.config, self.config.head_dim
        return native.Step(
            "rope",
            (Columns(COS), Columns(SIN)),
            Columns(QKV, 0, width),
            width,
            groups=config.num_heads + config.num_kv_heads,
            number=config.rms_norm_eps,
            weights=() if self.norm is None else (self.norm,),
        )


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Selection of experts for every row."""

    moe: MoE

    def run(self, state: State, store: Store | None) -> None:
        self.moe.route(state.scratch.normed, _room(state))


@dataclass(frozen=True, slots=True)
class RoutedExperts(Op):
    """The selected experts of every row."""

    moe: MoE

    def run(self, state: State, store: Store | None) -> None:
        self.moe.multiply_on_device(state.scratch.normed, _room(state), state.x)

    def cut(self, state: State) -> Cut | None:
        if self.moe.on_host is None:
            return None
        return DividedExperts(self.moe, state.scratch.normed, _room(state), state.x)


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """Sum of `x` over the tensor-parallel ranks."""

    reduce: Reduce

    def run(self, state: State, store: Store | None) -> None:
        self.reduce(state.x)

    def cut(self, state: State) -> Cut:
        return partial(self.reduce, state.x)


def _room(state: State) -> ExpertScratch:
    assert state.scratch.experts is not None  # the model has experts
    return state.scratch.experts


def row_program(ops: Sequence[Op], config: ModelConfig, dtype: torch.dtype) -> RowProgram | None:
    """Compile a stage to one native call, which wakes the threads once; None: an operation has no step."""
    steps = [step for op in ops if (step := op.row_step()) is not None]
    if len(steps) < len(ops):
        return None
    hidden, intermediate = config.hidden_size, config.intermediate_size
    own = (native.Buffer(width, dtype) for width in (hidden, 2 * intermediate, intermediate))
    return RowProgram([*given_buffers(config, dtype), *own], steps)
