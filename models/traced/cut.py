"""Cuts a graph at its attention into stages; a minimum cut over bytes selects the values that cross."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.graph import Exported
from neo_desktop.models.traced.recurrences import ROW_DIMS
from neo_desktop.models.traced.rows import is_value, name_of, row_dim, tensors_of, width_of

_SOURCE, _SINK = "source", "sink"


@dataclass(slots=True)
class Piece:
    """A stage: from carried values and attention's output it computes values for the next stage."""

    nodes: list[fx.Node] = field(default_factory=list)  # in order
    attended: fx.Node | None = None  # the attention before it
    attends: fx.Node | None = None  # the attention after it
    carried: tuple[fx.Node, ...] = ()  # to the next stage


@dataclass(frozen=True, slots=True)
class Cut:
    """A model's pieces: two before the first attention, then one after each attention."""

    pieces: list[Piece]  # the embeddings, then one stage more than layers
    normed: fx.Node  # input of the head: the last piece's result
    head: list[fx.Node]  # the head and the nodes after it
    scores: fx.Node
    constants: list[fx.Node]  # depend on weights only
    positional: list[fx.Node]  # depend on positions only
    rotations: tuple[fx.Node, ...]  # position-dependent values that stages read


def cut(exported: Exported, dtype: torch.dtype) -> Cut:
    """Cut a graph; values of a dtype may cross.

    Raises:
        CannotCutError: the graph is not a sequence of attentions.
    """
    order = [node for node in exported.graph.nodes if node.op == "call_function"]
    free = {*exported.parameters, *exported.buffers}
    constants = only(order, free)
    positional = only(order, {*free, *constants, exported.positions}, without=constants)
    apart = {*constants, *positional}
    rest = [node for node in order if node not in apart and is_value(node)]
    (results,) = exported.graph.output_node().args
    scores: Any = results[0]  # type: ignore[index]
    head, normed = _head(scores, rest, exported)
    body = [node for node in rest if node not in head]
    attentions = [node for node in body if name_of(node) == "attention"]
    pieces: list[Piece] = []
    left: list[fx.Node] = body
    carried: tuple[fx.Node, ...] = ()
    embeddings = [node for node in body if exported.token_ids in node.all_input_nodes]
    sources: Iterable[fx.Node] = embeddings
    for index in range(-1, len(attentions)):
        attended = attentions[index - 1] if index > 0 else None
        attends = attentions[index] if index >= 0 else None
        if attends is not None:
            sources = _ancestors(attends.all_input_nodes, set(left))
        following = attentions[index + 1] if index + 1 < len(attentions) else normed
        taken, crossing = _minimum(left, carried, set(sources), attends, following, dtype)
        nodes = [node for node in left if node in taken and node is not attends]
        pieces.append(Piece(nodes, attended, attends, crossing))
        left = [node for node in left if node not in taken and node is not attends]
        carried = crossing
    pieces.append(Piece(left, attentions[-1], None, ()))
    embedding_nodes = set(pieces[0].nodes)
    rotations = tuple(
        node
        for node in (exported.positions, *positional)
        if any(user not in apart and user not in embedding_nodes and user in set(body) for user in node.users)
        and isinstance(node.meta.get("val"), Tensor)
    )
    if any(node in rotations for each in pieces[-1].nodes for node in each.all_input_nodes):
        raise CannotCutError("a value after its last attention depends on positions")
    return Cut(pieces, normed, head, scores, constants, positional, rotations)


def only(order: list[fx.Node], known: set[fx.Node], without: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """Return the nodes that depend on known nodes only, in order, except `without`."""
    dependent, skipped = [], set(without)
    reached = set(known)
    for node in order:
        inputs = tensors_of(node)
        if node not in skipped and inputs and is_value(node) and all(source in reached for source in inputs):
            reached.add(node)
            dependent.append(node)
    return dependent


def _head(scores: fx.Node, rest: list[fx.Node], exported: Exported) -> tuple[list[fx.Node], fx.Node]:
    """Return the head with the nodes after it, in order, and its input."""
    behind = _ancestors([scores], set(rest), ends=lambda node: name_of(node) == "linear")
    head = [node for node in rest if node in behind]
    products = [node for node in head if name_of(node) == "linear"]
    if len(products) != 1:
        raise CannotCutError("it does not end with a head")
    normed = products[0].args[0]
    assert isinstance(normed, fx.Node)
    return head, normed


def _ancestors(
    nodes: list[fx.Node], among: set[fx.Node], ends: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """Return nodes and their ancestors; `ends`: ancestors of a node that it is True for are not followed."""
    ancestors, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node in among and node not in ancestors:
            ancestors.add(node)
            todo += () if ends(node) else node.all_input_nodes
    return ancestors


def _minimum(
    left: list[fx.Node],
    carried: tuple[fx.Node, ...],
    sources: set[fx.Node],
    attends: fx.Node | None,
    following: fx.Node,
    dtype: torch.dtype,
) -> tuple[set[fx.Node], tuple[fx.Node, ...]]:
    """Return the nodes of `left` before a cut, and the nodes that cross it.

    Args:
        left: nodes that earlier stages do not compute, in order.
        carried: values from the previous stage.
        sources: nodes that must be before the cut.
        attends: the attention at the cut, which belongs to neither side; None: no attention.
        following: the first node that must be after the cut, as all later ones.
    """
    import networkx  # noqa: PLC0415 - rarely needed

    end = left.index(following)
    region = [node for node in left[:end] if node is not attends]
    inside = {*region, *carried}
    graph = networkx.DiGraph()

    for node in (*carried, *region):
        graph.add_edge((node, "in"), (node, "out"), **_capacity(node, dtype))
        if node in sources or node in carried:
            graph.add_edge(_SOURCE, (node, "in"))
        for each in node.all_input_nodes if node not in carried else ():
            if each in inside:
                graph.add_edge((node, "in"), (each, "in"))  # inputs are on the same side or before
            elif each is attends:
                graph.add_edge((node, "in"), _SINK)
        for user in node.users:
            if user in inside and user not in carried:
                graph.add_edge((node, "out"), (user, "in"))
            elif user in left and user not in inside and user is not attends:
                graph.add_edge((node, "out"), _SINK)
    if attends is None:  # the embeddings know no states, and have no scratch memory of experts
        later_ones = {*ROW_DIMS, "experts"}
        graph.add_edges_from(((node, "in"), _SINK) for node in region if name_of(node) in later_ones)
    if _SINK not in graph or _SOURCE not in graph:
        raise CannotCutError("a part of it is unused")
    try:
        _, (before, _) = networkx.minimum_cut(graph, _SOURCE, _SINK)
    except networkx.NetworkXUnbounded:
        raise CannotCutError("a value that crosses an attention is not a hidden state") from None
    taken = {node for node in region if (node, "in") in before}
    crossing = tuple(
        node for node in (*carried, *region) if (node, "in") in before and (node, "out") not in before
    )
    return taken, crossing


def _capacity(node: fx.Node, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of a row as an edge's attribute; no attribute: the value must not cross."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype is not dtype or row_dim(node) is None:
        return {}
    return {"capacity": width_of(node) * dtype.itemsize}
