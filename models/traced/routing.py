"""The choice of experts in a model of `transformers`, between a router's logits and the experts' matmuls."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from neo_desktop import native
from neo_desktop.models.traced.experts import ExpertsProduct
from neo_desktop.models.traced.rows import name_of

Choose = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the ids and weights of the experts that logits `[n, experts]` select."""


class Routing(NamedTuple):
    """The nodes of a choice."""

    logits: fx.Node
    nodes: frozenset[fx.Node]
    code: fx.GraphModule  # logits → ids, weights

    def choose(self, experts: int, dtype: torch.dtype) -> Choose:
        """Return a native call that computes the same for logits of a dtype; if there is none, the code."""
        rank = torch.rand(64, experts, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
        # The best are without ties in 16 bits, as the order of ties is free.
        logits = 8 - rank * max(16 / experts, 1 / 8)
        logits[16:32] = -rank[16:32] / 100  # shows biases, which decide between close scores
        logits[32:48] -= 16
        logits[48:] = -52 - rank[48:] / 2  # shows numbers that are added to sums
        logits = logits.to(dtype)
        ids, weights = self.code(logits.clone())
        bound = 1e-4 if weights.dtype is torch.float32 else 1e-2
        expected = _sorted(ids, weights)
        k = ids.shape[1]
        found = torch.empty(64, k, dtype=torch.int32), torch.empty(64, k)
        for kind in self._kinds(experts):
            native.choose_experts(logits, ids=found[0], weights=found[1], **kind)
            ids, weights = _sorted(*found)
            if torch.equal(ids, expected[0]) and torch.allclose(weights, expected[1], rtol=bound, atol=0):
                return partial(_chosen, kind)
        return partial(_computed, self.code)

    def _kinds(self, experts: int) -> Iterator[Mapping[str, Any]]:
        """Yield settings of `native.choose_experts` with the code's own numbers."""
        nodes = self.code.graph.nodes
        given = [getattr(self.code, str(node.target)) for node in nodes if node.op == "get_attr"]
        vectors = [each.float() for each in given if each.shape == (experts,)]
        numbers = {each for node in nodes for each in node.args if isinstance(each, float)}
        scales = [torch.full((experts,), each) for each in sorted(numbers)]
        factors = [None, *vectors, *scales, *(one * other for one, other in product(vectors, scales))]
        for is_sigmoid, normalises, factor in product((False, True), (False, True), factors):
            sums = (0.0, *sorted(numbers)) if is_sigmoid else (0.0,)
            for bias, epsilon in product((None, *vectors) if is_sigmoid else (None,), sums):
                yield {
                    "is_sigmoid": is_sigmoid,
                    "normalises": normalises,
                    "epsilon": epsilon,
                    "bias": bias,
                    "factors": factor,
                }


def routings(piece: fx.GraphModule) -> dict[fx.Node, Routing]:
    """Return experts' matmuls -> their choice, if it depends on logits alone and serves nothing else."""
    modules = dict(piece.named_modules())
    found = {}
    for node in piece.graph.nodes:
        if node.op == "call_module" and isinstance(modules[str(node.target)], ExpertsProduct):
            routing = _routing(piece, node)
            if routing is not None:
                found[node] = routing
    return found


def _routing(piece: fx.GraphModule, experts: fx.Node) -> Routing | None:
    x, ids, weights = experts.args[:3]
    inner, sources, left = set[fx.Node](), set[fx.Node](), [ids, weights]
    while left:
        node = left.pop()
        if not isinstance(node, fx.Node) or node in inner:
            continue
        if node is x or node.op in ("call_module", "placeholder"):
            sources.add(node)
        else:
            inner.add(node)
            is_cast = name_of(node) == "type_as"  # its second input gives its dtype alone, as logits do
            left += node.all_input_nodes[: 1 if is_cast else None]
    own = {node for node in inner if node.op != "get_attr"}
    if len(sources) != 1 or any(not set(node.users) <= own | {experts} for node in own):
        return None
    (logits,) = sources
    graph = fx.Graph()
    given, copies = graph.placeholder("logits"), dict[fx.Node, fx.Node]()
    for node in piece.graph.nodes:
        if node in inner:
            copies[node] = graph.node_copy(node, lambda each: copies.get(each, given))
    graph.output(fx.node.map_arg((ids, weights), copies.__getitem__))
    return Routing(logits, frozenset(own), fx.GraphModule(piece, graph))


def _sorted(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(dim=1)
    return ids.gather(1, order).int(), weights.gather(1, order).float()


def _chosen(kind: Mapping[str, Any], logits: Tensor, ids: Tensor, weights: Tensor) -> None:
    native.choose_experts(logits, ids=ids, weights=weights, **kind)


def _computed(code: fx.GraphModule, logits: Tensor, ids: Tensor, weights: Tensor) -> None:
    chosen, shares = code(logits)
    ids.copy_(chosen)
    weights.copy_(shares)
