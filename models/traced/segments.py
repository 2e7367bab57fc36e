"""A stage's code, cut where a matrix that is split is multiplied."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from neo_desktop.models.decoder import TURN
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.traced.fused import Product


@dataclass(frozen=True, slots=True)
class Segment:
    """What is computed up to a product that is split, or to the end of the stage."""

    code: Callable[..., Any]  # of what it takes; the last one returns the stage's results
    takes: tuple[str, ...]  # names of the stage's inputs, and of what segments before and products give
    gives: tuple[str, ...]  # names of what it returns
    product: Product | None = None  # None: this is the last segment
    name: str = ""  # of a product with a split matrix, one of `TURN`
    given: str = ""  # the name of what the product is given, [.., columns]
    result: str = ""  # the name of what comes of it, [.., rows]

    @property
    def split(self) -> OffloadedLinear | None:
        """The matrix that is multiplied, if it is split."""
        linear = self.product.linear if self.product is not None else None
        return linear if isinstance(linear, OffloadedLinear) else None


def segments(pieces: Sequence[fx.GraphModule]) -> dict[int, list[Segment]]:
    """Cut the code of stages before and after products that are split.

    Products with offloaded matrices get the names in `TURN` by their order alone: the last one before an
    attention is "qkv". Those of one name have to be as wide everywhere; others, and those for which no name
    is left, are not cut out: stages compute them at once, while nothing overlaps.

    Args:
        pieces: all stages, by turn.

    Returns:
        The segments of those that are cut, by turn.
    """
    named: list[dict[fx.Node, tuple[str, int]]] = []
    widths: dict[str, Counter[int]] = defaultdict(Counter)
    for piece in pieces:
        linears = {node: each.linear for node in piece.graph.nodes if (each := _product(piece, node))}
        is_last, count = piece is pieces[-1], len(linears)
        names = TURN[:count] if is_last else TURN[max(len(TURN) - count, 0) :]
        nodes = list(linears)[: len(names)] if is_last else list(linears)[count - len(names) :]
        splits = {
            node: (name, split.columns)
            for node, name in zip(nodes, names, strict=True)
            if isinstance(split := linears[node], OffloadedLinear)
        }
        for name, columns in splits.values():
            widths[name][columns] += 1
        named.append(splits)
    usual = {name: counts.most_common(1)[0][0] for name, counts in widths.items()}
    cut = (
        {node: name for node, (name, columns) in splits.items() if columns == usual[name]} for splits in named
    )
    found = enumerate(zip(pieces, cut, strict=True))
    return {turn: _segments(piece, names) for turn, (piece, names) in found if names}


def _segments(module: fx.GraphModule, names: Mapping[fx.Node, str]) -> list[Segment]:
    """Cut a stage's code before and after some products."""
    cuts: list[tuple[list[fx.Node], fx.Node | None]] = []
    nodes: list[fx.Node] = []
    for node in module.graph.nodes:
        if node in names:
            cuts.append((nodes, node))
            nodes = []
        elif node.op not in ("placeholder", "get_attr", "output"):
            nodes.append(node)
    cuts.append((nodes, None))
    made, needed = [], {module.graph.output_node()}
    for nodes, cut in reversed(cuts):
        if cut is not None:
            needed.add(cut)
        made.append(_segment(module, nodes, cut, needed, "" if cut is None else names[cut]))
        needed.update(nodes)
    return made[::-1]


def _product(module: fx.GraphModule, node: fx.Node) -> Product | None:
    found = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, Product) else None


def _segment(
    module: fx.GraphModule, nodes: list[fx.Node], cut: fx.Node | None, later: set[fx.Node], name: str
) -> Segment:
    """Make the code of some nodes; `later` read what it gives."""
    graph, known, takes = fx.Graph(), dict[fx.Node, fx.Node](), list[str]()

    def find(node: fx.Node) -> fx.Node:
        if node not in known and node.op == "get_attr":
            known[node] = graph.node_copy(node)
        return known[node]

    output = module.graph.output_node()
    inside = set(nodes)
    readers = [*nodes, *([output] if cut is None else [])]
    for node in dict.fromkeys(each for reader in readers for each in reader.all_input_nodes):
        if node not in inside and node.op != "get_attr":
            known[node] = graph.placeholder(node.name)
            takes.append(node.name)
    for node in nodes:
        known[node] = graph.node_copy(node, find)
    gives = [] if cut is None else [node for node in nodes if later & set(node.users)]
    graph.output(fx.node.map_arg(output.args[0], find) if cut is None else tuple(known[n] for n in gives))
    code = fx.GraphModule(module, graph).forward
    names = tuple(node.name for node in gives)
    if cut is None:
        return Segment(code, tuple(takes), names)
    (given,) = cut.all_input_nodes
    return Segment(code, tuple(takes), names, _product(module, cut), name, given.name, cut.name)
