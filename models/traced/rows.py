"""The operators of a graph that treat every row alike; only attention and recurrent layers may mix tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.recurrences import ROW_DIMS

# Operators outside these tables are refused, unless torch calls them pointwise.
# fmt: off
RESHAPES = frozenset(("view", "reshape", "_unsafe_view"))
_WHOLE = RESHAPES | frozenset((
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "flatten",
    "unflatten", "movedim", "alias", "detach", "contiguous", "clone", "t", "getitem",
))
# No arithmetic, only other positions.
MOVES = _WHOLE | {"narrow", "slice", "select", "cat"}
_PLAIN = _WHOLE | frozenset((
    "to", "type_as", "_to_copy", "view_as", "reshape_as", "view_as_complex", "view_as_real", "dropout",
    "relu6", "hardswish", "isfinite", "polar", "__or__", "__and__", "lift_fresh_copy", "masked_fill_", "fill",
    "fill_", "zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "new_ones",
    "new_full", "deepstack",
))
SPLITS = frozenset(("split", "split_with_sizes", "chunk"))
_OVER_DIMS = frozenset((
    "mean", "sum", "softmax", "var", "std", "amax", "amin", "max", "min", "argmax", "cumsum", "logsumexp",
    "linalg_vector_norm",
))
# Search, sort or permute along one dimension.
_ALONG_ONE = frozenset((
    "topk", "sort", "argsort", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "repeat_interleave",
))
_OF_LAST = frozenset(("layer_norm", "rms_norm"))
# Operators along dimensions -> the argument that names them, and its default.
_DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(_OVER_DIMS, (1, None)),
    **dict.fromkeys(("slice", "select", "cat", "concat", "concatenate", "stack", "unbind"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "slice_scatter"), (2, 0)),
    **dict.fromkeys(_ALONG_ONE, (1, None)), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "repeat_interleave": (2, None),
}
# Matrix products -> arguments with the two factors; None: weights.
_FACTORS: dict[str, tuple[int, int | None]] = {
    "linear": (0, None), "addmm": (1, 2), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1),
}
# fmt: on


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator without overload: "add"."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(target, "__name__", target)))


def is_pointwise(node: fx.Node) -> bool:
    """Return True if torch calls the operator, or an overload without dimensions, pointwise."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    packet: Any = getattr(node.target, "overloadpacket", None)
    overloads = () if packet is None or name_of(node) in _DIMS else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_plain(node: fx.Node) -> bool:
    """Return True for an operator on single elements, or without arithmetic."""
    return is_pointwise(node) or name_of(node) in _PLAIN


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
        if node.op != "call_function" or not is_value(node):
            continue
        given = [each for each in node.all_input_nodes if row_dim(each) is not None]
        name = name_of(node)
        row_dim(node)
        if name == "attention" or not given or is_plain(node):
            continue
        if name in ROW_DIMS:
            keeps_rows = all(row_dim(each) == ROW_DIMS[name] for each in given)
        elif name == "experts":
            keeps_rows = all(row_dim(each) == 0 for each in given)
        elif name in _CHECKS:
            keeps_rows = _CHECKS[name](node, given)
        else:
            dims = _dims(node, given[0].meta["val"].dim())
            keeps_rows = dims is not None and row_dim(given[0]) not in dims
        if not keeps_rows:
            raise CannotCutError(f"{name} may mix tokens")


def _dims(node: fx.Node, rank: int) -> list[int] | None:
    """Return the dimensions along which an operator combines or moves elements; None: unknown."""
    name = name_of(node)
    if name in _OF_LAST:
        shape: Any = node.args[1]
        return list(range(rank - len(shape), rank)) if isinstance(shape, (list, tuple)) else None
    if name not in _DIMS:
        return None
    place, default = _DIMS[name]
    dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    if isinstance(dims, fx.Node) and name in _OVER_DIMS:  # elementwise maximum or minimum of two tensors
        return []
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if isinstance(dims, (list, tuple)) else None


def _slice(node: fx.Node, given: list[fx.Node]) -> bool:
    dims = _dims(node, given[0].meta["val"].dim())
    is_whole = tuple(node.args[2:]) in ((), (0,), (0, 2**63 - 1))
    return dims is not None and (is_whole or row_dim(given[0]) not in dims)


def _along_one(node: fx.Node, given: list[fx.Node]) -> bool:
    """Return True if all inputs have the same rows, and the operator works along another dimension."""
    dims, rows = _dims(node, given[0].meta["val"].dim()), {row_dim(each) for each in given}
    return dims is not None and len(rows) == 1 and rows.isdisjoint(dims)


def _index(node: fx.Node, given: list[fx.Node]) -> bool:
    indices: Any = node.args[1]
    own = row_dim(given[0]) or 0
    if node.args[0] is not given[0]:  # a row looks numbers up in a tensor without rows
        return len(given) == 1 and [each for each in indices if each is not None] == given
    is_known = len(given) == 1 and isinstance(indices, (list, tuple))
    return is_known and (len(indices) <= own or indices[own] is None)


def _product(node: fx.Node, given: list[fx.Node]) -> bool:
    if len(given) > 1:
        return False
    left, right = _FACTORS[name_of(node)]
    rank = int(given[0].meta["val"].dim())
    if node.args[left] is given[0]:
        return row_dim(given[0]) != rank - 1
    return right is not None and node.args[right] is given[0] and row_dim(given[0]) != rank - 2


_CHECKS: dict[str, Callable[[fx.Node, list[fx.Node]], bool]] = {
    "by_head": lambda node, given: row_dim(given[0]) == 2,
    "index": _index,
    "slice": _slice,
    "embedding": lambda node, given: True,
    **dict.fromkeys(_FACTORS, _product),
    **dict.fromkeys(_ALONG_ONE, _along_one),
}
