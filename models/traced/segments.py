"""A stage's code, cut at its offloaded matmuls."""

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
    """Code up to an offloaded matmul, or to the end of the stage."""

    code: Callable[..., Any]  # arguments: `takes`; the last segment returns the stage's results
    takes: tuple[str, ...]  # names of stage inputs, and of results of earlier segments and matmuls
    gives: tuple[str, ...]  # names of its results
    product: Product | None = None  # None: this is the last segment
    name: str = ""  # of the offloaded matrix, one of `TURN`
    given: str = ""  # name of the matmul's input, [.., columns]
    result: str = ""  # name of the matmul's result, [.., rows]

    @property
    def split(self) -> OffloadedLinear | None:
        """The offloaded matrix; None: the last segment."""
        linear = self.product.linear if self.product is not None else None
        return linear if isinstance(linear, OffloadedLinear) else None


def segments(pieces: Sequence[fx.GraphModule]) -> dict[int, list[Segment]]:
    """Cut the code of stages before and after offloaded matmuls.

    Offloaded matmuls get names of `TURN` by their order: the last one before an attention is "qkv". All
    matmuls with one name must have the same width. Other matmuls, and surplus ones, are not cut out: the
    stage computes them without overlap.

    Args:
        pieces: all stages, in order.

    Returns:
        Stage index -> segments, for the stages with cuts.
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
    stages = enumerate(zip(pieces, cut, strict=True))
    return {turn: _segments(piece, names) for turn, (piece, names) in stages if names}


def _segments(module: fx.GraphModule, names: Mapping[fx.Node, str]) -> list[Segment]:
    """Cut a stage's code before and after some matmuls."""
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
    target = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return target if isinstance(target, Product) else None


def _segment(
    module: fx.GraphModule, nodes: list[fx.Node], cut: fx.Node | None, later: set[fx.Node], name: str
) -> Segment:
    """Return the code of some nodes; nodes in `later` read its results."""
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
