"""Builds functions from the pieces of a graph."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from neo_desktop.models.linear.protocol import Embedding, Linear
from neo_desktop.models.operators import Operators
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.cut import Cut
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.deepstack import DeepStack
from neo_desktop.models.traced.experts import ExpertsProduct
from neo_desktop.models.traced.fused import Given, HeadsProduct, LookUp, Product
from neo_desktop.models.traced.graph import Exported
from neo_desktop.models.traced.recurrences import Convolution, Scan
from neo_desktop.models.traced.rows import name_of, row_dim, rows_first, width_of

Code = Callable[..., Any]
RECURRENT: Any = "recurrent"  # stands for a `RecurrentBatch`, an input of stages
ROOM: Any = "room"  # stands for the stage's `ExpertScratch`


class Part(NamedTuple):
    """A part of a fused matmul."""

    linear: Linear
    rows: tuple[int, ...]  # of every part
    place: int  # of this part


class Builder:
    """Builds functions from the pieces of a graph."""

    def __init__(
        self,
        graph: Exported,
        found: Cut,
        decoder: TracedDecoder,
        operators: Operators,
    ) -> None:
        self._graph, self._cut, self._decoder, self._operators = graph, found, decoder, operators
        self._root, self._number_of, self._constants = nn.Module(), 0, dict[fx.Node, Tensor]()
        self._spec = decoder.spec
        # A layer of multi-token prediction has given hidden states, never given embeddings.
        self._embeddings = () if decoder.config.source.predicts else found.pieces[0].carried[:1]
        self._products: dict[str, Part] = {
            weight: Part(decoder.matrices[fused.name], fused.part_rows, index)
            for fused in decoder.spec.all_matrices
            for index, weight in enumerate(fused.weights)
        }
        self._tables = {fused.weights[0]: decoder.matrices[fused.name] for fused in decoder.spec.tables}
        self._tables[decoder.spec.embedding] = decoder.embedding
        self._moe_layers = {
            each.gate_up: ExpertsProduct(each, decoder, operators) for each in decoder.spec.moe_layers
        }
        self._latents = {each.expand: each for each in decoder.spec.latents}
        if decoder.spec.head is None:
            self._products[decoder.spec.embedding] = Part(decoder.lm_head, (decoder.config.vocab_size,), 0)
        self._fold()

    def _product(self, node: fx.Node) -> Part | None:
        """Return a node's part of a matmul by the decoder; None: another operator or matmul."""
        if name_of(node) != "linear":
            return None
        return self._products.get(self._graph.parameters.get(_nodes_of(node)[1], ""))

    def _fold(self) -> None:
        """Precompute the nodes that depend on weights only."""
        for node, buffer in self._graph.buffers.items():
            self._constants[node] = buffer.to(self._decoder.device)
        for node, name in self._graph.parameters.items():
            if name in self._decoder.tensors:
                self._constants[node] = self._decoder.tensors[name]
            elif name in self._tables and any(
                name_of(user) != "embedding" and self._product(user) is None for user in node.users
            ):
                self._constants[node] = self._tables[name].dense()
        for node in self._cut.constants:
            if all(each in self._constants for each in node.all_input_nodes):
                given = fx.node.map_arg((node.args, node.kwargs), lambda each: self._constants[each])
                args, kwargs = self._here(given)
                operator: Any = node.target
                self._constants[node] = operator(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        """Replace devices in the graph by the decoder's."""
        return tree_map(lambda each: self._decoder.device if isinstance(each, torch.device) else each, value)

    def piece(self, index: int) -> fx.GraphModule:
        """Return a stage's code: from tokens and positions, or from carried values, rotations and attention.

        Nodes keep the descriptions of their values ("val"). The node of a rotation has "angle": the rotation
        and its rows in memory.
        """
        piece = self._cut.pieces[index]
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        if piece is self._cut.pieces[0]:
            known[self._graph.token_ids] = graph.placeholder("token_ids")
            known[self._graph.positions] = graph.placeholder("positions")
            rows = known[self._graph.token_ids]
            rows = graph.call_function(torch.ops.aten.sym_size.int, (rows, 1))
            self._copy(graph, self._cut.positional, known, rows)
        else:
            memory, rotation, attended = map(graph.placeholder, ("carried", "rotation", "attended"))
            known[RECURRENT], known[ROOM] = map(graph.placeholder, (RECURRENT, ROOM))
            rows = graph.call_function(torch.ops.aten.sym_size.int, (memory, 0))
            self._unpack(graph, memory, self._cut.pieces[index - 1].carried, known, rows)
            self._unpack(graph, rotation, self._cut.rotations, known, rows)
            if piece.attended is not None:
                attended.meta["val"] = piece.attended.meta["val"]
                known[piece.attended] = attended
        self._copy(graph, piece.nodes, known, rows)
        if piece is self._cut.pieces[-1]:
            results: tuple[Any, ...] = (known[self._cut.normed],)
        else:
            carried = tuple(rows_first(graph, each, known[each]) for each in piece.carried)
            qkv = () if piece.attends is None else _nodes_of(piece.attends)[: 1 + self._spec.kv_parts]
            results = (*(known[each] for each in qkv), *carried)
        return self._compiled(graph, results)

    def head(self) -> tuple[Code, Linear | None]:
        """Return the code of the scores from the head's input, and the matrix if it is a matmul alone."""
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        known[self._cut.normed] = graph.placeholder("normed")
        rows = graph.call_function(torch.ops.aten.sym_size.int, (known[self._cut.normed], 1))
        self._copy(graph, self._cut.head, known, rows)
        module = self._compiled(graph, known[self._cut.scores])
        used = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        if len(used) > 1 or used[0].op != "call_module":
            return module.forward, None
        only = module.get_submodule(str(used[0].target))
        return module.forward, only.linear if isinstance(only, Product) else None

    def rotation(self, sines: Collection[fx.Node] = ()) -> Code:
        """Return the code of the position-dependent values that stages read.

        Args:
            sines: values whose first half is negated, as `Rope` needs them.
        """
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        known[self._graph.positions] = graph.placeholder("positions")
        rows = graph.call_function(torch.ops.aten.sym_size.int, (known[self._graph.positions], 1))
        self._copy(graph, self._cut.positional, known, rows)
        ordered = []
        for node in self._cut.rotations:
            dim = row_dim(node)
            if dim is None:
                raise CannotCutError("a value that depends on positions has no rows")
            moved = graph.call_function(torch.movedim, (known[node], dim, 0))
            if node.meta["val"].dtype.is_complex:
                moved = graph.call_function(torch.view_as_real, (moved,))
            if node in sines:
                value = node.meta["val"]
                signs = torch.ones(value.shape[-1], dtype=value.dtype, device=self._decoder.device)
                signs[: len(signs) // 2] = -1.0
                kept = graph.get_attr(self._attribute("signs", signs))
                moved = graph.call_function(torch.mul, (moved, kept))
            ordered.append(moved)
        return self._compiled(graph, tuple(ordered)).forward

    def _unpack(
        self,
        graph: fx.Graph,
        memory: fx.Node,
        values: tuple[fx.Node, ...],
        known: dict[fx.Node, Any],
        rows: fx.Node,
    ) -> None:
        """Cut values out of rows that hold them side by side."""
        first = 0
        for node in values:
            value, dim = node.meta["val"], row_dim(node)
            assert dim is not None
            others = [size for at, size in enumerate(value.shape) if at != dim]
            width, is_complex = width_of(node), value.dtype.is_complex
            others += [2] if is_complex else []
            piece = graph.call_function(torch.narrow, (memory, 1, first, width))
            reshape = "view" if len(values) == 1 else "reshape"
            shaped = graph.call_method(reshape, (piece, rows, *others))
            if is_complex:
                shaped = graph.call_function(torch.view_as_complex, (shaped,))
            moved = graph.call_function(torch.movedim, (shaped, 0, dim))
            if not is_complex and (value.dtype is not self._decoder.dtype or memory.name == "rotation"):
                moved = graph.call_method("to", (moved, value.dtype))
            moved.meta["val"] = value
            if memory.name == "rotation":
                moved.meta["angle"] = node, piece
            known[node] = moved
            first += width

    def _copy(self, graph: fx.Graph, nodes: list[fx.Node], known: dict[fx.Node, Any], rows: fx.Node) -> None:
        """Copy nodes, and call the decoder's matrices for their matmuls."""
        fused: dict[int, fx.Node] = {}

        def find(node: fx.Node) -> Any:
            if node in known:
                return known[node]
            value = node.meta.get("val")
            if node in self._constants:
                known[node] = graph.get_attr(self._attribute("constant", self._constants[node]))
            elif isinstance(value, torch.SymInt) and name_of(node).startswith("sym_size"):
                known[node] = rows
            elif node.op == "call_function" and not isinstance(value, (Tensor, list, tuple)):
                known[node] = graph.node_copy(node, find)  # arithmetic of sizes
            else:
                raise CannotCutError(f"{node.name} is used before it is computed")
            return known[node]

        def multiply(node: fx.Node, part: Part) -> fx.Node:
            x, *weights = _nodes_of(node)
            linear, rows_of, place = part
            value, width = node.meta["val"], sum(rows_of)
            if id(linear) not in fused:
                module = self._attribute("product", Product(linear, width))
                fused[id(linear)] = graph.call_module(module, (find(x),))
                fused[id(linear)].meta["val"] = value.new_empty(*value.shape[:-1], width)
            result = fused[id(linear)]
            if len(rows_of) > 1:
                at = (-1, sum(rows_of[:place]), rows_of[place])
                result = graph.call_function(torch.narrow, (result, *at))
            if weights[1:] and part is self._products.get(self._spec.embedding):
                result = graph.call_function(torch.add, (result, find(weights[1])))
            result.meta["val"] = value
            return result

        for node in nodes:
            stands_in = self._stands_in(node)
            if stands_in is not None:
                module, inputs = stands_in
                known[node] = graph.call_module(module, tuple(each and find(each) for each in inputs))
                known[node].meta["val"] = node.meta["val"]
            elif (part := self._product(node)) is not None:
                known[node] = multiply(node, part)
            else:
                copied = graph.node_copy(node, find)
                copied.args = self._here(copied.args)
                copied.kwargs = self._here(copied.kwargs)
                known[node] = copied
            if node in self._embeddings:
                given = self._attribute("given", Given(self._decoder))
                known[node] = graph.call_module(given, (known[node],))
                known[node].meta["val"] = node.meta["val"]

    def _stands_in(self, node: fx.Node) -> tuple[str, list[Any]] | None:
        """Return the module that replaces a node, and its inputs; None: the node is copied."""
        name, given = name_of(node), _nodes_of(node)
        inputs: list[Any] = given[:1]
        if name == "embedding" and self._graph.parameters.get(given[0]) in self._tables:
            table = self._tables[self._graph.parameters[given[0]]]
            assert isinstance(table, Embedding)
            module: Any = LookUp(table, node.meta["val"].shape[-1], self._decoder.dtype)
            inputs = given[1:2]
        elif name == "convolve":
            weight, bias, has_silu, index = given[1:]
            bias = None if bias is None else self._constants[bias]
            module = Convolution(self._constants[weight], bias, index, self._operators, has_silu=has_silu)
            inputs = [given[0], RECURRENT]
        elif name == "scan":
            module, inputs = Scan(given[6], self._operators, is_delta=given[5]), [RECURRENT, *given[:5]]
        elif name == "by_head":
            latent, is_keys = self._latents[self._graph.parameters[given[1]]], given[2]
            module = HeadsProduct(self._decoder.matrices[(latent.keys if is_keys else latent.values).name])
        elif name == "experts":
            module, inputs = self._moe_layers[self._graph.parameters[given[3]]], [*given[:3], ROOM]
        elif name == "deepstack":
            module = DeepStack(self._decoder, given[1])
        else:
            return None
        return self._attribute(name, module), inputs

    def _attribute(self, kind: str, value: Any) -> str:
        name = f"{kind}_{self._number_of}"
        self._number_of += 1
        if isinstance(value, Tensor):
            self._root.register_buffer(name, value)
        else:
            self._root.add_module(name, value)
        return name

    def _compiled(self, graph: fx.Graph, results: Any) -> fx.GraphModule:
        graph.output(results)
        module = fx.GraphModule(self._root, graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module


def _nodes_of(node: fx.Node) -> list[Any]:
    return list(node.args)
