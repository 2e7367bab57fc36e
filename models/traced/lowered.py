"""Stages of a graph as steps over rows, which a CPU computes in one native call.

Lowering runs a stage's code once, with addresses in place of numbers. Views and slices only change addresses;
every other operator becomes a step that reads some buffers and writes another one.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.given_rows import ATTENTION, COS, GIVEN, QKV, RESIDUAL, X, given_buffers
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.models.traced.fused import AddRMSNorm, Gate, Product, RMSNorm, Rope
from neo_desktop.models.traced.places import (
    ROWS,
    NotRowsError,
    Value,
    ages_of,
    columns_of,
    grouped,
    moves_of,
    of_row,
    row_dim,
)
from neo_desktop.models.traced.rows import MOVES, SPLITS, name_of
from neo_desktop.native import Buffer, Columns, RowProgram, Step

_MOVES = MOVES | SPLITS | {"expand_as", "getitem"}
_VIEWS = frozenset(("view", "_unsafe_view"))
_UNARIES = frozenset(("silu", "sigmoid", "tanh", "relu", "gelu"))
_BINARIES = {"add": "add", "sub": "subtract", "mul": "times"}
_CASTS = frozenset(("to", "type_as", "_to_copy"))
_MOST_MOVES = 64  # of one value; with more, the graph's own operators are as fast


def lowered(piece: fx.GraphModule, config: ModelConfig, dtype: torch.dtype) -> RowProgram:
    """Return a stage before or after attention as a program of rows.

    Its buffers are those of `State.seen_by_native`. It leaves carried values in the residual, and queries,
    keys and values in qkv; the last stage leaves its result in x.

    Raises:
        NotRowsError: no step computes one of its operators.
    """
    return _Lowering(piece, config, dtype).program()


class _Lowering:
    def __init__(self, piece: fx.GraphModule, config: ModelConfig, dtype: torch.dtype) -> None:
        self._piece, self._config, self._dtype = piece, config, dtype
        self._buffers = given_buffers(config, dtype)
        self._steps: list[Step] = []
        self._overwritten: dict[int, Tensor] = {}  # buffer -> step at which each column was overwritten
        self._known: dict[fx.Node, Any] = {}

    def program(self) -> RowProgram:
        config = self._config
        inputs = {
            "carried": Value.new(RESIDUAL, (config.carried_width,), 0, self._dtype, 0),
            "rotation": Value.new(COS, (config.rotation_width,), 0, torch.float32, 0),
            "recurrent": None,
            "attended": Value.new(ATTENTION, (1, config.num_heads, config.head_dim), 1, self._dtype, 0),
        }
        for node in self._piece.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = inputs[node.target]
            elif node.op == "get_attr":
                self._known[node] = getattr(self._piece, node.target)
            elif node.op == "output":
                self._hand_on(*fx.node.map_arg(node.args[0], lambda source: self._known[source]))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: self._known[each])
                self._known[node] = self._computed(node, args, kwargs)
        return RowProgram(self._buffers, self._steps)

    # Nodes.

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op == "call_module":
            return self._operate(self._piece.get_submodule(str(node.target)), args)
        name = str(node.target) if node.op == "call_method" else name_of(node)
        if not any(isinstance(each, (Value, Tensor)) for each in _flat((args, kwargs))) or (
            name == "getitem" and isinstance(args[0], tuple)
        ):
            target: Any = node.target
            return target(*args, **kwargs)  # arithmetic of sizes
        if name == "sym_size":
            return args[0].at.shape[args[1]]
        return self._called(node, name, args, kwargs)

    def _called(self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _CASTS:
            return self._cast(args[0], _dtype_of(args, kwargs))
        if name in _MOVES:
            return self._moved(node, args, kwargs)
        if name == "index" and not any(isinstance(each, Value) for each in args[1]):
            x, places = args
            return replace(x, at=torch.ops.aten.index(x.at, places))
        if name in _UNARIES:
            approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
            return self._unary("gelu_tanh" if approximate == "tanh" else name, args[0])
        if name in _BINARIES:
            if kwargs.get("alpha", 1) != 1:
                raise NotRowsError("a sum with a factor")
            return self._binary(_BINARIES[name], args[0], args[1])
        if name == "layer_norm":
            return self._layer_norm(*args)
        raise NotRowsError(f"{name} has no step")

    def _operate(self, module: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(module, Product):
            return self._multiply(module, args[0])
        if isinstance(module, AddRMSNorm):
            return self._add_norm(module, *args)
        if isinstance(module, RMSNorm):
            (x,) = args
            if module.weight.dtype not in (x.dtype, torch.float32):
                raise NotRowsError("a norm of another dtype")
            return self._norm("rms_norm", x, x.at.shape[-1], module.eps, (module.weight,))
        if isinstance(module, Gate):
            (x,) = args
            return self._step("silu_mul", [self._packed(x)], x, (*x.at.shape[:-1], x.at.shape[-1] // 2))
        if isinstance(module, Rope):
            return self._rotate(module, *args)
        raise NotRowsError(f"{type(module).__name__} has no step")

    def _moved(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [each for each in _flat((args, kwargs)) if isinstance(each, (Value, Tensor))]
        values = [each for each in given if isinstance(each, Value)]
        if len(values) != len(given) or len({each.dtype for each in values}) > 1:
            raise NotRowsError("weights and rows side by side")
        moved_args, moved_kwargs = _with_addresses(args), _with_addresses(kwargs)
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

    def _cast(self, x: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or x.dtype is dtype:
            return x
        if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not isinstance(x, Value):
            raise NotRowsError(f"a conversion to {dtype}")
        return self._copy(x, dtype)

    def _multiply(self, product: Product, x: Value) -> Value:
        linear = product.linear
        if not isinstance(linear, PackedMatrix):
            raise NotRowsError("a matrix that is not in tiles")
        columns, rows = x.at.shape[-1], linear.rows
        if torch.Size(x.at.shape[:-1]).numel() != ROWS:
            raise NotRowsError("a matmul with several parts of a row")
        source = self._packed(x)
        into = self._room(rows, x.dtype)
        matrix = linear.native
        self._steps.append(Step("multiply", (source,), into, rows, groups=columns, matrix=matrix))
        return self._value(into, (*x.at.shape[:-1], rows), row_dim(x.at), x.dtype)

    def _add_norm(self, norm: AddRMSNorm, residual: Value, x: Value) -> tuple[Value, Value]:
        width = residual.at.shape[-1]
        self._check(residual)
        found = grouped(of_row(residual.at), width) if norm.in_place else None
        total = residual if found is not None else self._copy(residual, residual.dtype)
        place = self._packed(total)
        other = self._packed(x)
        into = self._room(width, x.dtype)
        step = Step("add_rms_norm", (place, other), into, width, number=norm.eps, weights=(norm.weight,))
        self._steps.append(step)
        total = self._overwrite(total)
        return total, self._value(into, tuple(x.at.shape), row_dim(x.at), x.dtype)

    def _rotate(self, rope: Rope, x: Value, cos: Value, sin: Value) -> Value:
        heads = replace(x, at=x.at[0] if rope.rows_first else x.at[0].transpose(0, 1))
        _, count, dim = heads.at.shape
        self._check(heads)
        place = grouped(of_row(heads.at), dim) if rope.in_place else None
        if place is None or (place.stride != dim and count > 1):
            heads = self._copy(heads, heads.dtype)
            place = self._grouped(heads, dim)
        angles = self._packed(cos), self._packed(sin)
        weights = () if rope.weight is None else (rope.weight,)
        into = place._replace(stride=dim)
        self._steps.append(Step("rope", angles, into, dim, groups=count, number=rope.eps, weights=weights))
        heads = self._overwrite(heads)
        return replace(heads, at=heads.at.transpose(0, 1)[None])

    def _layer_norm(
        self, x: Value, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Value:
        if len(shape) != 1:
            raise NotRowsError("a norm over several dimensions")
        width = shape[0]
        given = torch.ones(width, dtype=x.dtype) if weight is None else weight
        weights = (given,) if bias is None else (given, bias)
        if any(not isinstance(each, Tensor) or each.dtype is not x.dtype for each in weights):
            raise NotRowsError("a norm of another dtype")
        return self._norm("layer_norm", x, width, eps, tuple(each.contiguous() for each in weights))

    def _norm(self, op: str, x: Value, length: int, eps: float, weights: tuple[Tensor, ...]) -> Value:
        return self._step(
            op, [self._grouped(x, length)], x, tuple(x.at.shape), length, number=eps, weights=weights
        )

    def _unary(self, op: str, x: Value) -> Value:
        return self._step(op, [self._packed(x)], x, tuple(x.at.shape))

    def _binary(self, op: str, one: Any, other: Any) -> Value:
        if not isinstance(one, Value) and op != "subtract":
            one, other = other, one
        if not isinstance(one, Value):
            raise NotRowsError("a difference of a number and rows")
        if isinstance(other, (int, float)):
            number = float(-other if op == "subtract" else other)
            scalar_op = "times_number" if op == "times" else "add_number"
            return self._step(scalar_op, [self._packed(one)], one, tuple(one.at.shape), number=number)
        if other.dtype is not one.dtype:
            raise NotRowsError("operands of two dtypes")
        if isinstance(other, Value):
            at, other_at = _broadcast(one.at, other.at)
            sources = [self._packed(replace(one, at=at)), self._packed(replace(other, at=other_at))]
            return self._step(op, sources, one, tuple(at.shape))
        at, constant = _broadcast(one.at, other)
        by_row = constant.movedim(row_dim(at), 0).reshape(ROWS, -1)
        if not torch.equal(by_row, by_row[:1].expand_as(by_row)):
            raise NotRowsError("weights that differ between rows")
        sources = [self._packed(replace(one, at=at))]
        return self._step(op, sources, one, tuple(at.shape), weights=(by_row[0].contiguous(),))

    # Buffers and steps.

    def _step(
        self,
        op: str,
        sources: list[Columns],
        like: Value,
        shape: tuple[int, ...],
        length: int | None = None,
        *,
        number: float = 0.0,
        weights: tuple[Tensor, ...] = (),
    ) -> Value:
        """Compute a new tensor with the row dimension of `like`; `length`: per group."""
        dim = row_dim(like.at) - like.at.dim() + len(shape)
        if shape[dim] != ROWS:
            raise NotRowsError("a change of the row dimension")
        width = torch.Size(shape).numel() // ROWS
        size = width if length is None else length
        into = self._room(width, like.dtype)._replace(stride=size)
        groups = width // size
        self._steps.append(
            Step(op, tuple(sources), into, size, groups=groups, number=number, weights=weights)
        )
        return self._value(into, shape, dim, like.dtype)

    def _room(self, width: int, dtype: torch.dtype) -> Columns:
        self._buffers.append(Buffer(width, dtype))
        return Columns(len(self._buffers) - 1)

    def _value(self, into: Columns, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Value:
        row_shape = shape[:dim] + shape[dim + 1 :]
        return Value.new(into.buffer, row_shape, dim, dtype, len(self._steps))

    def _check(self, x: Value) -> None:
        """Raise NotRowsError if a value's numbers have been overwritten."""
        for buffer, columns, times in ages_of(x.at):
            when = self._overwritten.get(buffer)
            if when is not None and bool((when[columns] > times).any()):
                raise NotRowsError("numbers that are overwritten before they are read")

    def _overwrite(self, x: Value) -> Value:
        """Record that the last step has overwritten a value's numbers."""
        for buffer, columns in columns_of(of_row(x.at)).items():
            width = self._buffers[buffer].width
            when = self._overwritten.setdefault(buffer, torch.zeros(width, dtype=torch.int64))
            when[columns] = len(self._steps)
        return x.renewed(len(self._steps))

    def _packed(self, x: Value) -> Columns:
        """Return the columns that hold a value's rows contiguously; copy them if necessary."""
        return self._grouped(x, torch.Size(x.at.shape).numel() // ROWS)

    def _grouped(self, x: Value, length: int) -> Columns:
        self._check(x)
        row = of_row(x.at)
        columns = grouped(row, length)
        if columns is None:
            columns = grouped(of_row(self._copy(x, x.dtype).at), length)
        assert columns is not None
        return columns

    def _copy(self, x: Value, dtype: torch.dtype) -> Value:
        self._check(x)
        row = of_row(x.at)
        into = self._room(len(row), dtype)
        self._move(row, into)
        return self._value(into, tuple(x.at.shape), row_dim(x.at), dtype)

    def _move(self, row: Tensor, into: Columns) -> None:
        moves = moves_of(row)
        if len(moves) > _MOST_MOVES:
            raise NotRowsError("numbers scattered over too many places")
        for move in moves:
            to = Columns(into.buffer, into.first + move.first, move.stride)
            self._steps.append(Step("copy", (move.source,), to, move.length, groups=move.groups))

    # Results of a stage.

    def _hand_on(self, *results: Value) -> None:
        for each in results:
            self._check(each)
        if len(results) == 1:
            self._leave([of_row(results[0].at)], X)
            return
        heads = [of_row(each.at) for each in results[:3]]
        carried = torch.cat([of_row(each.at) for each in results[3:]])
        is_there = torch.equal(carried, torch.arange(len(carried)))
        reads_carried = not is_there and RESIDUAL in columns_of(torch.cat(heads))
        if reads_carried:
            self._move(torch.cat(heads), Columns(QKV))
        if not is_there and RESIDUAL in columns_of(carried):  # it would be overwritten while it is read
            room = self._room(len(carried), self._dtype)
            self._move(carried, room)
            carried = of_row(Value.new(room.buffer, (len(carried),), 0, self._dtype, 0).at)
        if not is_there:
            self._move(carried, Columns(RESIDUAL))
        if not reads_carried:
            self._leave(heads, QKV)

    def _leave(self, rows: list[Tensor], given: int) -> None:
        """Put numbers into a given buffer, by redirecting the steps that compute them if possible."""
        row = torch.cat(rows)
        found = grouped(row, len(row))
        if found is None or found.buffer in GIVEN or self._buffers[found.buffer].width != len(row):
            self._move(row, Columns(given))
            return

        def there(columns: Columns) -> Columns:
            return columns._replace(buffer=given) if columns.buffer == found.buffer else columns

        self._steps = [
            replace(step, sources=tuple(there(each) for each in step.sources), into=there(step.into))
            for step in self._steps
        ]


def _broadcast(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
    return one.expand(shape), other.expand(shape)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [each for one in value for each in _flat(one)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


def _with_addresses(value: Any) -> Any:
    if isinstance(value, Value):
        return value.at
    if isinstance(value, (list, tuple)):
        return type(value)(_with_addresses(each) for each in value)
    if isinstance(value, dict):
        return {key: _with_addresses(each) for key, each in value.items()}
    return value


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the target dtype of a conversion."""
    for each in (*args[1:], *kwargs.values()):
        if isinstance(each, torch.dtype):
            return each
        if isinstance(each, (Value, Tensor)):
            return each.dtype
    return None
