"""Stages of a graph as steps over rows, which a CPU computes in one native call.

Lowering runs a stage's code once, with addresses in place of numbers. Views and slices only change addresses;
every other operator becomes a step that reads some buffers and writes another one.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.moe import MoE
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.row_stages import RowStage
from neo_desktop.models.state import ATTENTION, COS, QKV, RESIDUAL, State, X, given_buffers
from neo_desktop.models.traced.fused import AddRMSNorm, Gate, HeadsProduct, Product, RMSNorm, Rope
from neo_desktop.models.traced.places import (
    ROWS,
    Complex,
    NotRowsError,
    RowBuffers,
    Value,
    columns_of,
    of_row,
    row_dim,
    with_addresses,
)
from neo_desktop.models.traced.recurrences import Convolution, Scan
from neo_desktop.models.traced.routing import Choose, Routing, routings
from neo_desktop.models.traced.rows import MOVES, SPLITS, name_of
from neo_desktop.native import Columns, Step

_MOVES = MOVES | SPLITS | {"expand_as", "getitem", "stack"}
_VIEWS = frozenset(("view", "_unsafe_view"))
_UNARIES = frozenset(("silu", "sigmoid", "tanh", "relu", "gelu", "softplus"))
_BINARIES = {"add": "add", "sub": "subtract", "mul": "times"}
_CASTS = frozenset(("to", "type_as", "_to_copy"))
_FUNCTIONS = frozenset(("clamp", "exp"))  # of few numbers: torch computes them


def lowered(piece: fx.GraphModule, config: ModelConfig, dtype: torch.dtype) -> RowStage:
    """Return a stage before or after attention as programs of rows.

    Its buffers are those of `State.seen_by_native`. It leaves carried values in the residual, and queries,
    keys and values in qkv; the last stage leaves its result in x.

    Raise NotRowsError if no step computes one of its operators.
    """
    return _Lowering(piece, config, dtype).program()


class _Lowering(RowBuffers):
    def __init__(self, piece: fx.GraphModule, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(given_buffers(config, dtype))
        self._piece, self._config, self._dtype = piece, config, dtype
        self._known: dict[fx.Node, Any] = {}

    def program(self) -> RowStage:
        config = self._config
        inputs = {
            "carried": Value.new(RESIDUAL, (config.carried_width,), 0, self._dtype),
            "rotation": Value.new(COS, (config.rotation_width,), 0, torch.float32),
            "recurrent": None,
            "room": None,
            "attended": Value.new(ATTENTION, (1, config.num_heads, config.head_dim), 1, self._dtype),
        }
        routed = routings(self._piece)
        skipped = {node for routing in routed.values() for node in routing.nodes}
        for node in self._piece.graph.nodes:
            if node in skipped:
                continue
            if node.op == "placeholder":
                self._known[node] = inputs[node.target]
            elif node in routed:
                self._known[node] = self._mixed(node, routed[node])
            elif node.op == "get_attr":
                self._known[node] = getattr(self._piece, node.target)
            elif node.op == "output":
                self._hand_on(*fx.node.map_arg(node.args[0], lambda source: self._known[source]))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: self._known[each])
                self._known[node] = self._computed(node, args, kwargs)
        return self.stage()

    # Nodes.

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op == "call_module":
            return self._operate(self._piece.get_submodule(str(node.target)), args)
        name = str(node.target) if node.op == "call_method" else name_of(node)
        if not any(isinstance(each, (Value, Tensor)) for each in tree_leaves((args, kwargs))) or (
            name == "getitem" and isinstance(args[0], tuple)
        ):
            target: Any = node.target
            return target(*args, **kwargs)  # arithmetic of sizes
        if name == "sym_size":
            return args[0].at.shape[args[1]]
        return self._called(node, name, args, kwargs)

    def _called(self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _MOVES:
            return self._moved(node, args, kwargs)
        for names, lower in (
            (_CASTS, lambda: self._cast(args[0], node.meta["val"].dtype)),
            (_FUNCTIONS, lambda: self._apply(node.target, *args)),
            (_UNARIES, lambda: self._unary(_approximated(name, args, kwargs), args[0])),
            (_BINARIES, lambda: self._binary(_BINARIES[name], args[0], args[1], kwargs.get("alpha", 1))),
            (("square",), lambda: self._binary("times", args[0], args[0])),
            (("neg",), lambda: self._binary("times", args[0], -1.0)),
            (("view_as_complex",), lambda: Complex.of(args[0])),
            (("view_as_real",), lambda: Complex.pairs(args[0])),
            (("zeros_like",), lambda: self._binary("times", args[0], 0.0)),
            (("layer_norm",), lambda: self._layer_norm(*args)),
            (("rms_norm",), lambda: self._plain_norm(*args)),
            (("index",), lambda: self._indexed(*args)),
        ):
            if name in names:
                return lower()
        raise NotRowsError(f"{name} has no step")

    def _operate(self, module: Any, args: tuple[Any, ...]) -> Any:
        for kind, lower in (
            (Product, lambda: self._multiply(module, args[0])),
            (HeadsProduct, lambda: self._matmul(module.linear, args[0], args[0].at.shape[1])),
            (AddRMSNorm, lambda: self._add_norm(module, *args)),
            (RMSNorm, lambda: self._norm("rms_norm", args[0], module.eps, module.weight)),
            (Gate, lambda: self._gated(args[0])),
            (Rope, lambda: self._rotate(module, *args)),
            (Convolution, lambda: self.call(partial(_with_states, module), [args[0]], args[0], 2)),
            (Scan, lambda: self.call(partial(_with_states, module), list(args[1:]), args[3], 1)),
        ):
            if isinstance(module, kind):
                return lower()
        raise NotRowsError(f"{type(module).__name__} has no step")

    def _mixed(self, node: fx.Node, routing: Routing) -> Value:
        experts: Any = self._piece.get_submodule(str(node.target))
        if experts.moe.on_host is not None or self._config.experts is None:
            raise NotRowsError("experts in host memory, or without common scratch memory")
        x, logits = self._known[node.all_input_nodes[0]], self._known[routing.logits]
        if logits.at.dim() != 2:
            raise NotRowsError("logits of experts that are not [rows, experts]")
        choose = routing.choose(logits.at.shape[-1], logits.dtype)
        return self.call(partial(_with_room, choose, experts.moe), [x, logits], x, row_dim(x.at))

    def _plain_norm(self, x: Any, shape: list[int], weight: Any = None, eps: Any = None) -> Value:
        if not isinstance(x, Value) or len(shape) != 1 or weight is not None or eps is None:
            raise NotRowsError("a norm over several dimensions, or with weights")
        return self._norm("rms_norm", x, eps, torch.ones(shape, dtype=x.dtype))

    def _gated(self, x: Value) -> Value:
        return self.step("silu_mul", [self.packed(x)], x, (*x.at.shape[:-1], x.at.shape[-1] // 2))

    def _indexed(self, x: Any, places: list[Any]) -> Value:
        if not isinstance(x, Value) or any(isinstance(each, Value) for each in places):
            raise NotRowsError("an index that differs between rows")
        return replace(x, at=torch.ops.aten.index(x.at, places))

    def _moved(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Complex):
            return Complex(*(self._moved(node, (part, *args[1:]), kwargs) for part in args[0]))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, (Value, Tensor))]
        values = [each for each in given if isinstance(each, Value)]
        if len(values) != len(given) or len({each.dtype for each in values}) > 1:
            raise NotRowsError("weights and rows side by side")
        moved_args, moved_kwargs = with_addresses(args), with_addresses(kwargs)
        if name_of(node) in _VIEWS:  # the strides of addresses may differ from those of the numbers
            sizes = moved_args[1] if isinstance(moved_args[1], (list, tuple)) else moved_args[1:]
            moved = moved_args[0].reshape(sizes)
        elif node.op == "call_method":
            moved = getattr(moved_args[0], str(node.target))(*moved_args[1:], **moved_kwargs)
        else:
            target: Any = node.target
            moved = target(*moved_args, **moved_kwargs)
        dtype = values[0].dtype
        if isinstance(moved, Tensor):
            return Value(moved, dtype)
        return tuple(Value(each, dtype) for each in moved)

    def _cast(self, x: Any, dtype: torch.dtype) -> Any:
        if isinstance(x, Complex):
            raise NotRowsError("a conversion of complex numbers")
        if x.dtype is dtype:
            return x
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotRowsError(f"a conversion to {dtype}")
        return self.copy(x, dtype) if isinstance(x, Value) else x.to(dtype)

    def _multiply(self, product: Product, x: Value) -> Value:
        if torch.Size(x.at.shape[:-1]).numel() != ROWS:
            raise NotRowsError("a matmul with several parts of a row")
        return self._matmul(product.linear, x, 1)

    def _matmul(self, linear: Linear, x: Value, heads: int) -> Value:
        """Multiply heads by the matrices that `linear` has stacked."""
        if not isinstance(linear, PackedMatrix):
            raise NotRowsError("a matrix that is not in tiles")
        columns, width = x.at.shape[-1], linear.rows // heads
        source = self.grouped(x, columns)
        into = self.room(linear.rows, x.dtype)._replace(stride=width)
        matrix = linear.native
        self.steps.append(Step("multiply", (source,), into, width, groups=columns, matrix=matrix))
        return self.value(into, (*x.at.shape[:-1], width), row_dim(x.at), x.dtype)

    def _add_norm(self, norm: AddRMSNorm, residual: Value, x: Value) -> tuple[Value, Value]:
        width = residual.at.shape[-1]
        total = self.copy(residual, residual.dtype)  # the step overwrites it
        into = self.room(width, x.dtype)
        sources = self.packed(total), self.packed(x)
        step = Step("add_rms_norm", sources, into, width, number=norm.eps, weights=(norm.weight,))
        self.steps.append(step)
        return total, self.value(into, tuple(x.at.shape), row_dim(x.at), x.dtype)

    def _rotate(self, rope: Rope, x: Value, cos: Value, sin: Value) -> Value:
        heads = replace(x, at=x.at[0].transpose(0, rope.rows_at[0] - 1))
        _, count, dim = heads.at.shape
        heads = self.copy(heads, heads.dtype)  # the step overwrites them
        into = self.grouped(heads, dim)._replace(stride=dim)
        angles = self.packed(cos), self.packed(sin)
        weights = () if rope.weight is None else (rope.weight,)
        self.steps.append(Step("rope", angles, into, dim, groups=count, number=rope.eps, weights=weights))
        return replace(heads, at=heads.at.transpose(0, rope.rows_at[1] - 1)[None])

    def _layer_norm(
        self, x: Value, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Value:
        if len(shape) != 1:
            raise NotRowsError("a norm over several dimensions")
        given = torch.ones(shape, dtype=x.dtype) if weight is None else weight
        return self._norm("layer_norm", x, eps, given, *(() if bias is None else (bias,)))

    def _norm(self, op: str, x: Value, eps: float, *weights: Any) -> Value:
        dtypes = (x.dtype, torch.float32) if op == "rms_norm" else (x.dtype,)
        if any(not isinstance(each, Tensor) or each.dtype not in dtypes for each in weights):
            raise NotRowsError("a norm of another dtype")
        length, given = x.at.shape[-1], tuple(each.contiguous() for each in weights)
        sources = [self.grouped(x, length)]
        return self.step(op, sources, x, tuple(x.at.shape), length, number=eps, weights=given)

    def _unary(self, op: str, x: Value) -> Value:
        return self.step(op, [self.packed(x)], x, tuple(x.at.shape))

    def _binary(self, op: str, one: Any, other: Any, factor: Any = 1) -> Any:
        if factor != 1:
            raise NotRowsError("a sum with a factor")
        if isinstance(one, Complex) or isinstance(other, Complex):
            if not isinstance(one, Complex) or not isinstance(other, Complex) or op != "times":
                raise NotRowsError("a sum of complex numbers, or a product with real ones")
            return one.times(other, self._binary)
        if not isinstance(one, Value) and op != "subtract":
            one, other = other, one
        if not isinstance(one, Value):
            raise NotRowsError("a difference of a number and rows")
        if isinstance(other, (int, float)):
            number = float(-other if op == "subtract" else other)
            scalar_op = "times_number" if op == "times" else "add_number"
            return self.step(scalar_op, [self.packed(one)], one, tuple(one.at.shape), number=number)
        wide = torch.promote_types(one.dtype, other.dtype)
        one, other = (self._cast(x, wide) for x in (one, other))
        if isinstance(other, Value):
            at, other_at = _broadcast(one.at, other.at)
            sources = [self.packed(replace(one, at=at)), self.packed(replace(other, at=other_at))]
            return self.step(op, sources, one, tuple(at.shape))
        at, constant = _broadcast(one.at, other)
        by_row = constant.movedim(row_dim(at), 0).reshape(ROWS, -1)
        if not torch.equal(by_row, by_row[:1].expand_as(by_row)):
            raise NotRowsError("weights that differ between rows")
        sources = [self.packed(replace(one, at=at))]
        return self.step(op, sources, one, tuple(at.shape), weights=(by_row[0].contiguous(),))

    def _apply(self, function: Any, x: Any, *others: Any) -> Value:
        """Apply a function of single numbers that has no step."""
        if not isinstance(x, Value):
            raise NotRowsError("a function of weights")
        return self.call(partial(_applied, function, others), [x], x, row_dim(x.at))

    # Results of a stage.

    def _hand_on(self, *results: Value) -> None:
        if len(results) == 1:
            self.move(of_row(results[0].at), Columns(X))
            return
        first = 1 + self._config.kv_parts
        self.move(torch.cat([of_row(each.at) for each in results[:first]]), Columns(QKV))
        carried = torch.cat([of_row(each.at) for each in results[first:]])
        if torch.equal(carried, torch.arange(len(carried))):  # already in place
            return
        if RESIDUAL in columns_of(carried):  # it would be overwritten while it is read
            room = self.room(len(carried), self._dtype)
            self.move(carried, room)
            carried = of_row(Value.new(room.buffer, (len(carried),), 0, self._dtype).at)
        self.move(carried, Columns(RESIDUAL))


def _applied(function: Any, others: tuple[Any, ...], _: State, __: object, out: Tensor, x: Tensor) -> None:
    out.copy_(function(x, *others))


def _with_states(layer: Convolution | Scan, _: State, batch: RecurrentBatch, *tensors: Tensor) -> None:
    layer.apply_rows(batch, *tensors)


def _with_room(
    choose: Choose, moe: MoE, state: State, _: object, out: Tensor, x: Tensor, logits: Tensor
) -> None:
    room = state.scratch.experts
    assert room is not None  # the model has experts
    choose(logits, room.choice.ids, room.choice.weights)
    moe.multiply_on_device(x, room, out)


def _broadcast(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
    return one.expand(shape), other.expand(shape)


def _approximated(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if name == "softplus" and (args[1:] or kwargs):
        raise NotRowsError("softplus with a slope or a threshold")
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    return "gelu_tanh" if approximate == "tanh" else name
