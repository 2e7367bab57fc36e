"""Operators of a graph, changed so that they compute a rank's part; see `division`."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.masks import Part
from neo_desktop.models.traced.rows import SPLITS, name_of

_SLICE = torch.ops.aten.slice.Tensor
_SHAPES = frozenset(("view", "reshape", "_unsafe_view", "expand", "broadcast_to"))  # whose sizes are given


def slice_splits(graph: fx.Graph) -> None:
    """Take slices in the place of what tensors are split into."""
    for node in [each for each in graph.nodes if name_of(each) in SPLITS]:
        x, dim, first = node.all_input_nodes[0], _split_dim(node), 0
        for index, piece in enumerate(node.meta["val"]):
            size = piece.shape[dim]
            if not isinstance(size, int):
                raise CannotCutError("it splits rows")
            for item in [each for each in node.users if each.args[1] == index]:
                with graph.inserting_before(item):
                    taken = graph.call_function(_SLICE, (x, dim, first, first + size))
                taken.meta["val"] = item.meta["val"]
                item.replace_all_uses_with(taken)
                graph.erase_node(item)
            first += size
        if not node.users:
            graph.erase_node(node)


def _split_dim(node: fx.Node) -> int:
    """Return the dimension, from the last one: as patterns know slices."""
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    rank = node.all_input_nodes[0].meta["val"].dim()
    return int(dim % rank - rank)


def localise(node: fx.Node, part: Part | None, given: dict[fx.Node, Part | None]) -> None:
    """Change the sizes and places that a move is given, to those of a rank's part.

    Args:
        node: the move.
        part: of its result.
        given: its inputs that are needed, and the parts of them that there are.
    """
    name, (x, *rest) = name_of(node), node.args
    if name == "cat":
        pieces: Any = x
        node.args = ([each for each in pieces if each in given], *rest)
    elif name in ("slice", "select"):
        _localise_places(node, given)
    elif part is not None and name in _SHAPES:
        node.args = (x, _with_size(rest[0], part), *rest[1:])
    elif part is not None and name == "unflatten":
        rank: Any = x.meta["val"].dim()  # type: ignore[union-attr]
        dim: Any = rest[0]
        node.args = (x, dim, _with_size(rest[1], replace(part, dim=part.dim - dim % rank)))
    if name in ("view", "_unsafe_view"):  # a part need not lie in one piece
        node.target = torch.ops.aten.reshape.default


def _localise_places(node: fx.Node, given: dict[fx.Node, Part | None]) -> None:
    x, dim, *places = node.args if len(node.args) > 1 else (*node.args, 0)
    assert isinstance(x, fx.Node)
    assert isinstance(dim, int)
    part, shape = given[x], x.meta["val"].shape
    if part is None or dim % len(shape) != part.dim:
        return
    count = 1 if name_of(node) == "select" else 2  # of places; a slice's step follows
    ends = [None if at is None else part.before(_place(at, shape[part.dim])) for at in places[:count]]
    node.args = (x, dim, *ends, *places[count:])


def _place(at: Any, size: int) -> int:
    return int(at + size if at < 0 else at)


def _with_size(sizes: Any, part: Part) -> list[Any]:
    count = len(part.places)
    return [count if dim == part.dim and size != -1 else size for dim, size in enumerate(sizes)]


def sliced(graph: fx.Graph, node: fx.Node, part: Part) -> fx.Node:
    """Put what takes a part of a whole value into a graph."""
    value, pieces = node.meta["val"], list[fx.Node]()
    dim = part.dim - value.dim()
    with graph.inserting_after(node):
        for run in reversed(part.runs):  # each is put before the one that was put last
            pieces.insert(0, graph.call_function(_SLICE, (node, dim, run.start, run.stop)))
    for piece, run in zip(pieces, part.runs, strict=True):
        piece.meta["val"] = of_part(value, Part(part.dim, tuple(range(run.start, run.stop))))
        piece.meta["whole"] = value
    if len(pieces) == 1:
        return pieces[0]
    with graph.inserting_after(pieces[-1]):
        together = graph.call_function(torch.ops.aten.cat.default, (pieces, dim))
    together.meta["val"], together.meta["whole"] = of_part(value, part), value
    return together


def of_part(value: Any, part: Part) -> Any:
    """Return what stands for a part of a value in a graph."""
    shape = [len(part.places) if dim == part.dim else size for dim, size in enumerate(value.shape)]
    return value.new_empty(shape)
