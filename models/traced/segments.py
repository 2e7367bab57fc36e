"""A stage's code, cut at its offloaded matmuls."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch.fx.passes.split_module import split_module

from neo_desktop.models.decoder import TURN
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.traced.fused import Product


class Segments:
    """The code of a stage between its offloaded matmuls, which the caller computes.

    Args:
        products: calls of offloaded matmuls in the stage's graph -> names in `TURN`, and matrices.
    """

    def __init__(self, stage: fx.GraphModule, products: dict[fx.Node, tuple[str, OffloadedLinear]]) -> None:
        parts, part = dict[fx.Node, int](), 0  # even parts are code, odd ones matmuls
        for node in stage.graph.nodes:
            part += node in products
            parts[node] = part
            part += node in products
        self._module = split_module(stage, stage, parts.__getitem__, keep_original_order=True)
        graph = self._module.graph
        self._inputs = graph.find_nodes(op="placeholder")
        weights = graph.find_nodes(op="get_attr")
        self._weights = {node: getattr(self._module, node.target) for node in weights}
        calls = {node.target: node for node in graph.nodes}
        self.products = {calls[f"submod_{parts[node]}"]: named for node, named in products.items()}

    def values(self, inputs: Iterable[Any]) -> dict[fx.Node, Any]:
        """Return the values of weights and inputs, which are known before; `inputs`: in the code's order."""
        return self._weights | dict(zip(self._inputs, inputs, strict=True))

    def run(self, values: dict[fx.Node, Any], until: fx.Node | None = None) -> Any:
        """Compute the values of nodes before an offloaded matmul, and return the matmul's input.

        Args:
            values: nodes' values so far, those of earlier matmuls included.
            until: the matmul's node; None: compute the stage's results, and return them.
        """
        for node in self._module.graph.nodes:
            if node in values:
                continue
            args = fx.node.map_arg(node.args, values.__getitem__)
            if node is until or node.op == "output":
                return args[0]
            code: Any = node.target
            values[node] = getattr(self._module, code)(*args) if node.op == "call_module" else code(*args)
        raise AssertionError("the stage has no such matmul")


def segments(pieces: Sequence[fx.GraphModule]) -> dict[int, Segments]:
    """Cut the code of stages before and after offloaded matmuls.

    Offloaded matmuls get names of `TURN` by their order: the last one before an attention is "qkv". All
    matmuls with one name must have the same width. Other matmuls, and surplus ones, are not cut out: the
    stage computes them without overlap.

    Args:
        pieces: all stages, in order.

    Returns:
        Stage index -> segments, for the stages with cuts.
    """
    named: list[dict[fx.Node, tuple[str, OffloadedLinear]]] = []
    widths: dict[str, Counter[int]] = defaultdict(Counter)
    for piece in pieces:
        calls = piece.graph.find_nodes(op="call_module")
        modules = {node: piece.get_submodule(node.target) for node in calls}
        linears = {node: module.linear for node, module in modules.items() if isinstance(module, Product)}
        is_last, count = piece is pieces[-1], len(linears)
        names = TURN[:count] if is_last else TURN[max(len(TURN) - count, 0) :]
        nodes = list(linears)[: len(names)] if is_last else list(linears)[count - len(names) :]
        splits = {
            node: (name, split)
            for node, name in zip(nodes, names, strict=True)
            if isinstance(split := linears[node], OffloadedLinear)
        }
        for name, split in splits.values():
            widths[name][split.columns] += 1
        named.append(splits)
    usual = {name: counts.most_common(1)[0][0] for name, counts in widths.items()}
    cuts = [
        {node: (name, split) for node, (name, split) in splits.items() if split.columns == usual[name]}
        for splits in named
    ]
    stages = enumerate(zip(pieces, cuts, strict=True))
    return {index: Segments(piece, splits) for index, (piece, splits) in stages if splits}
