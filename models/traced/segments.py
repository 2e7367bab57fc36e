"""A stage's code, cut at its offloaded matmuls and experts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx.passes.split_module import split_module

from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.moe import MoE
from neo_desktop.models.ops import EXPERTS
from neo_desktop.models.traced.experts import ExpertsProduct
from neo_desktop.models.traced.fused import Product

Named = tuple[str, OffloadedLinear | MoE]
"""A cut's name in `Stages.turn`, and what it computes with."""


class Segments:
    """The code of a stage between its cuts, which the caller computes.

    Args:
        cuts: calls of offloaded matmuls and experts in the stage's graph -> names in `Stages.turn`, and what
            they compute with.
    """

    def __init__(self, stage: fx.GraphModule, cuts: dict[fx.Node, Named]) -> None:
        parts, part = dict[fx.Node, int](), 0  # even parts are code, odd ones cuts
        for node in stage.graph.nodes:
            part += node in cuts
            parts[node] = part
            part += node in cuts
        self._module = split_module(stage, stage, parts.__getitem__, keep_original_order=True)
        graph = self._module.graph
        self._inputs = graph.find_nodes(op="placeholder")
        weights = graph.find_nodes(op="get_attr")
        self._weights = {node: getattr(self._module, node.target) for node in weights}
        calls = {node.target: node for node in graph.nodes}
        self.cuts = {calls[f"submod_{parts[node]}"]: named for node, named in cuts.items()}

    def values(self, inputs: Iterable[Any]) -> dict[fx.Node, Any]:
        """Return the values of weights and inputs, which are known before; `inputs`: in the code's order."""
        return self._weights | dict(zip(self._inputs, inputs, strict=True))

    def run(self, values: dict[fx.Node, Any], until: fx.Node | None = None) -> Any:
        """Compute the values of nodes before a cut, and return the cut's inputs.

        Args:
            values: nodes' values so far, those of earlier cuts included.
            until: the cut's node; None: compute the stage's results, and return them.
        """
        for node in self._module.graph.nodes:
            if node in values:
                continue
            args = fx.node.map_arg(node.args, values.__getitem__)
            if node is until:
                return args
            if node.op == "output":
                return args[0]
            code: Any = node.target
            values[node] = getattr(self._module, code)(*args) if node.op == "call_module" else code(*args)
        raise AssertionError("the stage has no such cut")


def segments(pieces: Sequence[fx.GraphModule]) -> tuple[dict[int, Segments], tuple[str, ...]]:
    """Cut the code of stages before and after offloaded matmuls, and experts in host memory.

    A hybrid's stage may have many of both. Cuts get names by their number in the stage, and matmuls by their
    width as well, because the CPU's matmuls of one name share memory. So all stages have their names in one
    order.

    Args:
        pieces: all stages, in order.

    Returns:
        Stage index -> segments, for the stages with cuts; and the names of a turn, see `Stages.turn`.
    """
    cuts = [{node: (place, part) for place, node, part in _cuts(piece)} for piece in pieces]
    places = sorted({place for of_stage in cuts for place, _ in of_stage.values()})
    names = {
        (number, width): f"matmul {number} of width {width}" if width else f"{EXPERTS} {number}"
        for number, width in places
    }
    found = {}
    for index, (piece, of_stage) in enumerate(zip(pieces, cuts, strict=True)):
        if of_stage:
            named = {node: (names[place], part) for node, (place, part) in of_stage.items()}
            found[index] = Segments(piece, named)
    return found, tuple(names.values())


def _cuts(piece: fx.GraphModule) -> Iterator[tuple[tuple[int, int], fx.Node, OffloadedLinear | MoE]]:
    """Yield number and width (of experts 0), node, and matrix or experts of a stage's cuts, in order."""
    number = 0
    for node in piece.graph.find_nodes(op="call_module"):
        module = piece.get_submodule(node.target)
        if isinstance(module, Product) and isinstance(module.linear, OffloadedLinear):
            number += 1
            yield (number, module.linear.columns), node, module.linear
        elif isinstance(module, ExpertsProduct) and module.moe.on_host is not None:
            number += 1
            yield (number, 0), node, module.moe
