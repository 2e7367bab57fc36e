"""A stage's code, cut at its offloaded matmuls and experts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch.fx.passes.split_module import split_module

from neo_desktop.models.decoder import TURN
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.moe import MoE
from neo_desktop.models.ops import EXPERTS
from neo_desktop.models.traced.experts import ExpertsProduct
from neo_desktop.models.traced.fused import Product

Named = tuple[str, OffloadedLinear | MoE]
"""A cut's name in `Stages.turn`, and what it computes with."""
Place = tuple[int, int]
"""Sorts the cuts of a turn: index in `TURN` and -1 of a matmul, index and number of experts after it."""


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

    Offloaded matmuls get names of `TURN` by their order: the last one before an attention is "qkv". All
    matmuls with one name must have the same width. Other matmuls, and surplus ones, are not cut out: the
    stage computes them without overlap. A hybrid's stage may have several mixtures of experts. Names of
    experts are chosen so that every stage has its names in one order, the order of a turn.

    Args:
        pieces: all stages, in order.

    Returns:
        Stage index -> segments, for the stages with cuts; and the names of a turn, see `Stages.turn`.
    """
    named = [_named(piece, is_last=piece is pieces[-1]) for piece in pieces]
    widths: dict[Place, Counter[int]] = defaultdict(Counter)
    for cuts in named:
        for place, part in cuts.values():
            if isinstance(part, OffloadedLinear):
                widths[place][part.columns] += 1
    usual = {place: counts.most_common(1)[0][0] for place, counts in widths.items()}
    names = {(index, -1): name for index, name in enumerate(TURN)}
    of_experts = sorted({place for cuts in named for place, _ in cuts.values()} - names.keys())
    names |= {place: f"{EXPERTS} {number}" for number, place in enumerate(of_experts, 1)}
    found = {}
    for index, (piece, cuts) in enumerate(zip(pieces, named, strict=True)):
        own = {
            node: (names[place], part)
            for node, (place, part) in cuts.items()
            if isinstance(part, MoE) or part.columns == usual[place]
        }
        if own:
            found[index] = Segments(piece, own)
    return found, tuple(names[place] for place in sorted(names))


def _named(piece: fx.GraphModule, *, is_last: bool) -> dict[fx.Node, tuple[Place, OffloadedLinear | MoE]]:
    """Return a stage's offloaded matmuls with a name, and its experts in host memory, with their places."""
    modules = {node: piece.get_submodule(node.target) for node in piece.graph.find_nodes(op="call_module")}
    linears = [node for node, module in modules.items() if isinstance(module, Product)]
    shift = 0 if is_last else len(TURN) - len(linears)  # of a matmul's number to its index in TURN
    numbers = {node: number + shift for number, node in enumerate(linears) if 0 <= number + shift < len(TURN)}
    found: dict[fx.Node, tuple[Place, OffloadedLinear | MoE]] = {}
    place = (-1, 0)  # of the next experts
    for node, module in modules.items():
        if node in numbers:
            place = (numbers[node], 0)
            if isinstance(module.linear, OffloadedLinear):
                found[node] = (numbers[node], -1), module.linear
        elif isinstance(module, ExpertsProduct) and module.moe.on_host is not None:
            found[node] = place, module.moe
            place = (place[0], place[1] + 1)
    return found
