"""The operators of a graph that treat every row alike; only attention and recurrent layers may mix tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.recurrences import ROW_DIMS

# Operators on single elements, or without arithmetic. Operators outside these tables are refused.
# fmt: off
ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "reciprocal", "exp", "expm1", "log",
    "log1p", "tanh", "floor",
    "sigmoid", "silu", "gelu", "relu", "relu6", "cos", "sin", "erf", "abs", "square", "clamp",
    "clamp_min", "clamp_max", "where", "minimum", "maximum", "softplus", "hardtanh", "hardswish",
    "hardsigmoid", "elu", "mish", "leaky_relu", "to", "type_as", "_to_copy", "clone", "contiguous",
    "detach", "alias", "dropout", "rsub", "ge", "gt", "le", "lt", "eq", "ne", "logical_and",
    "logical_or", "logical_not", "masked_fill", "bitwise_and", "zeros_like", "ones_like", "full_like",
    "lift_fresh_copy", "getitem", "view", "reshape", "_unsafe_view", "transpose", "permute",
    "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as", "broadcast_to",
    "flatten", "unflatten", "t", "movedim", "add_",
    "mul_", "div_", "sub_", "clamp_", "clamp_min_", "clamp_max_", "silu_", "relu_", "bitwise_not",
    "isfinite", "nan_to_num", "__or__", "__and__", "bitwise_or",
    "new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "fill", "fill_", "masked_fill_",
    "polar", "view_as_complex", "view_as_real", "deepstack",
))
# No arithmetic, only other positions.
MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "expand",
    "broadcast_to", "flatten", "unflatten", "movedim", "narrow", "slice", "select", "cat", "alias", "detach",
    "contiguous", "clone", "t",
))
SPLITS = frozenset(("split", "split_with_sizes", "chunk"))
_OVER_DIMS = frozenset((
    "mean", "sum", "softmax", "var", "std", "amax", "amin", "max", "min", "argmax", "cumsum", "logsumexp",
    "linalg_vector_norm",
))
_OVER_ONE = frozenset((
    "slice", "select", "cat", "concat", "stack", "split", "split_with_sizes", "chunk", "unbind",
    "slice_scatter",
))
# Search, sort or permute along one dimension.
_ALONG_ONE = frozenset((
    "topk", "sort", "argsort", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "repeat_interleave",
))
_OF_LAST = frozenset(("layer_norm", "rms_norm"))
_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "embedding"))
# fmt: on


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator without overload: "add"."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(target, "__name__", target)))


def is_value(node: fx.Node) -> bool:
    """Return True if a node's value is one or several tensors."""
    return isinstance(node.meta.get("val"), (Tensor, list, tuple))


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return a node's inputs with tensor values."""
    return [each for each in node.all_input_nodes if is_value(each)]


def row_dim(node: fx.Node) -> int | None:
    """Return the row dimension of a node's value; None: it has no rows.

    Raises:
        CannotCutError: rows are not one whole dimension.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    dims = [dim for dim, size in enumerate(value.shape) if not isinstance(size, int)]
    if not dims:
        return None
    if len(dims) > 1 or not str(value.shape[dims[0]]).isidentifier():
        raise CannotCutError(f"{name_of(node)} mixes tokens")
    return dims[0]


def rows_first(graph: fx.Graph, node: fx.Node, value: Any) -> Any:
    """Return a node's value with its rows before the dimensions larger than 1."""
    dim = row_dim(node)
    if dim is None or node.meta["val"].shape[:dim].numel() == 1:
        return value
    return graph.call_function(torch.movedim, (value, dim, 0))


def width_of(node: fx.Node) -> int:
    """Return the numbers per row of a node's value; a complex number counts as two."""
    value, dim = node.meta["val"], row_dim(node)
    numbers = torch.Size([size for at, size in enumerate(value.shape) if at != dim]).numel()
    return int(numbers) * (2 if value.dtype.is_complex else 1)


def check_rows(graph: fx.Graph) -> None:
    """Raise CannotCutError if an operator other than attention and recurrent layers may mix tokens."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
            continue
        given = [each for each in node.all_input_nodes if row_dim(each) is not None]
        name = name_of(node)
        if isinstance(node.meta["val"], Tensor):
            row_dim(node)
        if name == "attention" or not given:
            continue
        if name in ROW_DIMS and all(row_dim(each) == ROW_DIMS[name] for each in given):
            continue
        if name in ELEMENTWISE or _CHECKS.get(_kind(name), _refused)(node, given):
            continue
        raise CannotCutError(f"{name} may mix tokens")


def _kind(name: str) -> str:
    kinds = {
        "dims": _OVER_DIMS,
        "one": _OVER_ONE,
        "last": _OF_LAST,
        "product": _PRODUCTS,
        "along": _ALONG_ONE,
    }
    for kind, names in kinds.items():
        if name in names:
            return kind
    return name if name in ("index", "experts") else ""


def _index(node: fx.Node, given: list[fx.Node]) -> bool:
    indices: Any = node.args[1]
    own = row_dim(given[0])
    if node.args[0] is not given[0]:  # a row looks numbers up in a tensor without rows
        return len(given) == 1 and [each for each in indices if each is not None] == given
    return (
        len(given) == 1
        and isinstance(indices, (list, tuple))
        and (len(indices) <= (own or 0) or indices[own or 0] is None)
    )


def _refused(_node: fx.Node, _given: list[fx.Node]) -> bool:
    return False


def _over_dims(node: fx.Node, given: list[fx.Node]) -> bool:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dims, fx.Node):  # elementwise maximum or minimum of two tensors
        return True
    if dims is None:
        return False
    rank = given[0].meta["val"].dim()
    over: Any = [dims] if isinstance(dims, int) else dims
    return row_dim(given[0]) not in [dim % rank for dim in over]


def _over_one(node: fx.Node, given: list[fx.Node]) -> bool:
    place = {"slice": 1, "select": 1, "cat": 1, "concat": 1, "stack": 1, "unbind": 1, "narrow": 1}.get(
        name_of(node), 2
    )
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    rank = given[0].meta["val"].dim()
    if not isinstance(dim, int):
        return False
    if row_dim(given[0]) != dim % rank:
        return True
    return name_of(node) == "slice" and tuple(node.args[2:]) in ((), (0,), (0, 2**63 - 1))


def _along_one(node: fx.Node, given: list[fx.Node]) -> bool:
    """Return True if the operator works along one dimension other than the rows."""
    name = name_of(node)
    place = {"topk": 2, "repeat_interleave": 2}.get(name, 1)
    default = -1 if name in ("topk", "sort", "argsort") else None
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    rows = {row_dim(each) for each in given}
    return isinstance(dim, int) and len(rows) == 1 and dim % given[0].meta["val"].dim() not in rows


def _experts(_node: fx.Node, given: list[fx.Node]) -> bool:
    return all(row_dim(each) == 0 for each in given)


def _over_last(node: fx.Node, given: list[fx.Node]) -> bool:
    shape = node.args[1]
    rank = given[0].meta["val"].dim()
    return isinstance(shape, (list, tuple)) and row_dim(given[0]) not in range(rank - len(shape), rank)


def _product(node: fx.Node, given: list[fx.Node]) -> bool:
    name = name_of(node)
    if name == "embedding":
        return True
    if len(given) > 1:
        return False
    places = {"linear": (0, None), "addmm": (1, 2)}.get(name, (0, 1))
    left = node.args[places[0] or 0]
    rank = given[0].meta["val"].dim()
    if left is given[0]:
        return bool(row_dim(given[0]) != rank - 1)
    right = places[1]
    return bool(right is not None and node.args[right] is given[0] and row_dim(given[0]) != rank - 2)


_CHECKS: dict[str, Callable[[fx.Node, list[fx.Node]], bool]] = {
    "dims": _over_dims,
    "one": _over_one,
    "last": _over_last,
    "product": _product,
    "index": _index,
    "along": _along_one,
    "experts": _experts,
}
