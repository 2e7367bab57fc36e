"""The operations of a stage: a layer's arithmetic, written once.

A stage is the work between the attention of two layers, as a list of operations on the buffers of a `State`.
The list has three readers: `Stages.advance` runs it, `Stages.steps` cuts it at the operations that the engine
carries out itself, and `row_stage` compiles it for a CPU to native calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
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
from neo_desktop.models.row_stages import Call, RowStage
from neo_desktop.models.state import (
    ATTENTION,
    COS,
    GIVEN,
    NORMED,
    QKV,
    RESIDUAL,
    SIN,
    State,
    X,
    given_buffers,
)
from neo_desktop.native import Columns

EXPERTS = "experts"  # name of a layer's experts in a turn
MAX_ROWS = 32  # of a row program: their quantised form fits a core's caches; more rows gain nothing

Reduce = Callable[[Tensor], object]
"""All-reduce: replaces each rank's tensor by the sum over all ranks; see `models.ranks`."""

COLUMNS = {
    "residual": Columns(RESIDUAL),
    "x": Columns(X),
    "qkv": Columns(QKV),
    "attention": Columns(ATTENTION),
    "scratch.normed": Columns(NORMED),
    "scratch.gate_up": Columns(len(GIVEN)),
    "scratch.gated": Columns(len(GIVEN) + 1),
}
"""The buffers of row programs, by their names in a state."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matmul with an offloaded matrix."""

    name: str  # one of `Stages.turn`
    linear: OffloadedLinear
    x: Tensor  # [n, columns], contiguous
    out: Tensor  # [n, rows]


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """A layer's experts that are partly in host memory, and the rows routed to them."""

    name: str  # one of `Stages.turn`
    moe: MoE
    x: Tensor  # [rows, hidden]: reusable after the device's experts have read it
    room: ExpertScratch  # has the routing
    out: Tensor  # [rows, hidden]


Cut = Product | DividedExperts | Callable[[], object]
"""What the engine carries out: overlapped parts, or an all-reduce between graphs."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation on a state's buffers.

    Args:
        run: computes it; its second argument is the target of keys and values.
        step: the same in a row program; None: there is none.
        cut: returns what the engine carries out instead of `run`; None: nothing.
        offloaded: name in `TURN` and matrix of an offloaded matmul.
        splits: row programs may end before it and begin after it, because the state has its buffers. It
            stores no keys and values.
    """

    run: Callable[[State, Store | None], object]
    step: native.Step | None = None
    cut: Callable[[State], Cut] | None = None
    offloaded: tuple[str, OffloadedLinear] | None = None
    splits: bool = False


def matmul(name: str, linear: Linear, x: str, out: str) -> Op:
    """Return `out = x @ weight.T + bias`; x and out are names in a state, and `name` is one of `TURN`."""
    input_of, output_of = attrgetter(x), attrgetter(out)

    def run(state: State, _: Store | None) -> None:
        linear.multiply(input_of(state).flatten(1), output_of(state))

    if isinstance(linear, OffloadedLinear):
        matrix = linear
        return Op(
            run,
            cut=lambda state: Product(name, matrix, input_of(state).flatten(1), output_of(state)),
            offloaded=(name, matrix),
        )
    if not isinstance(linear, PackedMatrix):
        return Op(run)
    columns = linear.packed_parts[0].columns
    into = COLUMNS[out]
    step = native.Step("multiply", (COLUMNS[x],), into, linear.rows, groups=columns, matrix=linear.native)
    return Op(run, step)


def add_norm(operators: Operators, weight: Tensor, eps: float) -> Op:
    """Return `residual += x`, then RMSNorm of the sum."""

    def run(state: State, _: Store | None) -> None:
        operators.add_rms_norm(state.x, state.residual, weight, eps, state.scratch.normed)

    sources, into = (COLUMNS["residual"], COLUMNS["x"]), COLUMNS["scratch.normed"]
    return Op(run, native.Step("add_rms_norm", sources, into, len(weight), number=eps, weights=(weight,)))


def gate(operators: Operators, width: int) -> Op:
    """Return SwiGLU's activation."""
    step = native.Step("silu_mul", (COLUMNS["scratch.gate_up"],), COLUMNS["scratch.gated"], width)
    return Op(lambda state, _: operators.silu_mul(state.scratch.gate_up, state.scratch.gated), step)


def rotate(operators: Operators, config: ModelConfig, norm: Tensor | None) -> Op:
    """Return RoPE of queries and keys, which stores keys and values in a cache if there is one."""
    eps, width = config.rms_norm_eps, config.head_dim

    def run(state: State, store: Store | None) -> None:
        if store is None:
            operators.rope(state.qkv, state.cos, state.sin, config.num_kv_heads, norm, eps)
        else:
            operators.rope_append(state.qkv, state.cos, state.sin, *store, norm, eps)

    heads, weights = config.num_heads + config.num_kv_heads, () if norm is None else (norm,)
    angles, into = (Columns(COS), Columns(SIN)), Columns(QKV, 0, width)
    return Op(run, native.Step("rope", angles, into, width, groups=heads, number=eps, weights=weights))


def experts(moe: MoE) -> list[Op]:
    """Return the selection of experts for every row, and the selected experts."""

    def run(state: State, _: Store | None) -> None:
        moe.multiply_on_device(state.scratch.normed, _room(state), state.x)

    def cut(state: State) -> Cut:
        return DividedExperts(EXPERTS, moe, state.scratch.normed, _room(state), state.x)

    route = Op(lambda state, _: moe.route(state.scratch.normed, _room(state)), splits=True)
    return [route, Op(run, cut=None if moe.on_host is None else cut, splits=True)]


def all_reduce(reduce: Reduce) -> Op:
    """Return the sum of `x` over the tensor-parallel ranks."""
    return Op(lambda state, _: reduce(state.x), cut=lambda state: partial(reduce, state.x))


def _room(state: State) -> ExpertScratch:
    assert state.scratch.experts is not None  # the model has experts
    return state.scratch.experts


def row_stage(ops: Sequence[Op], config: ModelConfig, dtype: torch.dtype) -> RowStage | None:
    """Compile the operations between experts to one native call each, which wakes the threads once.

    None: an operation has no step.
    """
    if any(op.step is None and not op.splits for op in ops):
        return None
    own = (native.Buffer(width * config.intermediate_size, dtype) for width in (2, 1))
    parts: list[list[native.Step] | Call] = []
    for splits, some in groupby(ops, lambda op: op.splits):
        run = list(some)
        parts += [Call(op.run) for op in run] if splits else [[op.step for op in run if op.step is not None]]
    return RowStage([*given_buffers(config, dtype), *own], parts)
