"""Stages that are pieces of a graph; see `models.stages` for what is asked of them."""

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from neo_desktop.models import operators as in_torch
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages, State, Step
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.cut import Cut, Piece, cut
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.graph import Exported, exported, name_of, row_dim
from neo_desktop.models.traced.outline import cannot_cut

Code = Callable[..., Any]


class _Product(nn.Module):
    """A linear layer, whatever dimensions precede the last one of its input."""

    def __init__(self, linear: Linear, rows: tuple[int, ...]) -> None:
        super().__init__()
        self._linear, self._rows, self._all = linear, rows, sum(rows)

    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        out = self._linear.multiply(flat, flat.new_empty(len(flat), self._all)).view(*x.shape[:-1], self._all)
        return out if len(self._rows) == 1 else torch.split(out, list(self._rows), dim=-1)


class _LookUp(nn.Module):
    def __init__(self, decoder: TracedDecoder) -> None:
        super().__init__()
        self._decoder = decoder

    def forward(self, token_ids: Tensor) -> Tensor:
        rows, width = (
            token_ids.flatten(),
            self._decoder.outline.parameters[self._decoder.outline.embedding][1],
        )
        out = torch.empty(len(rows), width, dtype=self._decoder.dtype, device=token_ids.device)
        self._decoder.embed(rows, out)
        return out.view(*token_ids.shape, width)


class TracedStages(Stages):
    """The stages of a model of `transformers`.

    Raises:
        ModelError: it cannot be cut.
    """

    def __init__(self, decoder: TracedDecoder) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.has_head = True
        self.mixtures = {}
        self._reduce = None
        self._weights = decoder
        config = decoder.config
        graph = exported(config.path, decoder.dtype, decoder.outline.aliases)  # type: ignore[attr-defined]
        try:
            found = cut(graph, decoder.dtype)
            _check_widths(found, decoder)
        except CannotCutError as error:
            raise cannot_cut(config.path, config, error) from None  # type: ignore[attr-defined]
        self._kernels = _Builder(graph, found, decoder)
        self._embed, *self._pieces = (self._kernels.piece(piece) for piece in found.pieces)
        self._carried = [piece.carried for piece in found.pieces]
        self._head = self._kernels.head()
        self._rotate = self._kernels.rotation()

    @classmethod
    def of(cls, decoder: TracedDecoder) -> "TracedStages":
        """Return a decoder's stages, which are made once."""
        if decoder.stages is None:
            decoder.stages = cls(decoder)
        found: TracedStages = decoder.stages
        return found

    @property
    def writes_in_place(self) -> bool:
        """Code of others makes tensors of its own."""
        return False

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:  # noqa: D102
        values = self._embed(token_ids[None].long(), positions[None].long())
        _keep(values, state.residual)
        self.rotate(positions, state.cos, state.sin)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Compute what depends on positions alone: all of it lies in `cos`."""
        first = 0
        for value in self._rotate(positions[None].long()):
            rows = value.reshape(len(positions), -1)
            cos[:, 0, first : first + rows.shape[1]].copy_(rows)
            first += rows.shape[1]

    def advance(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> None:
        """See `Stages`; what follows a layer's attention and what precedes the next one's are one stage."""
        index = 0 if finished is None else finished + 1
        results = self._pieces[index](state.residual, state.cos[:, 0], state.attention[None])
        if index == len(self._pieces) - 1:
            state.x = results[0].flatten(0, 1)
            return
        q, k, v, *carried = results
        _keep(carried, state.residual)
        config = self.config
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        first = 0
        for each in (q, k, v):
            heads[:, first : first + each.shape[1]].copy_(each[0].transpose(0, 1))
            first += each.shape[1]
        if store is not None:
            _, keys, values = self.heads(state)
            in_torch.write_rows(keys, values, store.k_cache, store.v_cache, store.slots)

    def steps(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> Iterator[Step]:
        """See `Stages`: there are no split matrices."""
        yield Step(lambda: self.advance(finished, begun, state, store), None)

    def final_norm(self, state: State, out: Tensor) -> None:  # noqa: D102
        out.copy_(state.x)

    def logits(self, normed: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        scores: Tensor = self._head(normed[None]).flatten(0, 1)
        return scores


def _check_widths(found: Cut, decoder: TracedDecoder) -> None:
    """Raise CannotCutError where there is no room for what stages hand on."""
    carried = max(sum(_width(node) for node in piece.carried) for piece in found.pieces)
    if carried > decoder.config.carried_width:
        raise CannotCutError("more than hidden states has to go from layer to layer")
    if sum(_width(node) for node in found.rotations) > decoder.config.rotation_width:
        raise CannotCutError("too much of it depends on positions")


def _width(node: fx.Node) -> int:
    dim = row_dim(node)
    return int(torch.Size([size for at, size in enumerate(node.meta["val"].shape) if at != dim]).numel())


def _keep(values: Any, memory: Tensor) -> None:
    """Put values [1, rows, ..] beside each other into memory [rows, width]."""
    together = torch.cat([value.reshape(len(memory), -1) for value in values], dim=1)
    memory[:, : together.shape[1]].copy_(together)


class _Builder:
    """Makes functions of pieces of a graph."""

    def __init__(self, graph: Exported, found: Cut, decoder: TracedDecoder) -> None:
        self._graph, self._cut, self._decoder = graph, found, decoder
        self._root = nn.Module()
        self._constants: dict[fx.Node, Tensor] = {}
        self._number_of = 0
        self._outline = decoder.outline
        self._products: dict[str | None, tuple[Linear, tuple[int, ...], int]] = {
            weight: (linear, fused.rows, index)
            for fused, linear in decoder.fused
            for index, weight in enumerate(fused.weights)
        }
        if decoder.outline.head is None:
            self._products[decoder.outline.embedding] = (decoder.lm_head, (decoder.config.vocab_size,), 0)
        self._fold()

    def _fold(self) -> None:
        """Compute what depends on weights only, once."""
        for node, buffer in self._graph.buffers.items():
            self._constants[node] = buffer.to(self._decoder.device)
        for node, name in self._graph.parameters.items():
            if name in self._decoder.tensors:
                self._constants[node] = self._decoder.tensors[name]
        for node in self._cut.constants:
            if all(each in self._constants for each in node.all_input_nodes):
                given = fx.node.map_arg((node.args, node.kwargs), lambda each: self._constants[each])
                args, kwargs = self._here(given)
                operator: Any = node.target
                self._constants[node] = operator(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        """Name the decoder's device where the graph names another one."""
        if isinstance(value, torch.device):
            return self._decoder.device
        if isinstance(value, (list, tuple)):
            return type(value)(self._here(each) for each in value)
        if isinstance(value, dict):
            return {key: self._here(each) for key, each in value.items()}
        return value

    def piece(self, piece: Piece) -> Code:
        """Return a stage's code: of tokens and positions, or of what is carried, rotations and attention."""
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        is_first = piece is self._cut.pieces[0]
        if is_first:
            known[self._graph.token_ids] = graph.placeholder("token_ids")
            known[self._graph.positions] = graph.placeholder("positions")
            rows = known[self._graph.token_ids]
            rows = graph.call_function(torch.ops.aten.sym_size.int, (rows, 1))
            self._copy(graph, self._cut.positional, known, rows)
        else:
            index = self._cut.pieces.index(piece)
            memory, rotation = graph.placeholder("carried"), graph.placeholder("rotation")
            attended = graph.placeholder("attended")
            rows = graph.call_function(torch.ops.aten.sym_size.int, (memory, 0))
            self._unpack(graph, memory, self._cut.pieces[index - 1].carried, known, rows)
            used = {each for node in piece.nodes for each in node.all_input_nodes}
            self._unpack(graph, rotation, self._cut.rotations, known, rows, only=used)
            if piece.attended is not None:
                known[piece.attended] = attended
        self._copy(graph, piece.nodes, known, rows)
        if piece is self._cut.pieces[-1]:
            results: tuple[Any, ...] = (known[self._cut.normed],)
        else:
            carried = tuple(known[each] for each in piece.carried)
            heads = (
                () if piece.attends is None else tuple(known[each] for each in _nodes_of(piece.attends)[:3])
            )
            results = (*heads, *carried)
        return self._compiled(graph, results)

    def head(self) -> Code:
        """Return the code of scores, of what the head multiplies."""
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        known[self._cut.normed] = graph.placeholder("normed")
        rows = graph.call_function(torch.ops.aten.sym_size.int, (known[self._cut.normed], 1))
        self._copy(graph, self._cut.head, known, rows)
        return self._compiled(graph, known[self._cut.scores])

    def rotation(self) -> Code:
        """Return the code of what stages read of positions."""
        graph, known = fx.Graph(), dict[fx.Node, Any]()
        known[self._graph.positions] = graph.placeholder("positions")
        rows = graph.call_function(torch.ops.aten.sym_size.int, (known[self._graph.positions], 1))
        self._copy(graph, self._cut.positional, known, rows)
        ordered = []
        for node in self._cut.rotations:
            dim = row_dim(node)
            if dim is None:
                raise CannotCutError("what depends on positions has no rows")
            ordered.append(graph.call_function(torch.movedim, (known[node], dim, 0)))
        return self._compiled(graph, tuple(ordered))

    def _unpack(
        self,
        graph: fx.Graph,
        memory: fx.Node,
        values: tuple[fx.Node, ...],
        known: dict[fx.Node, Any],
        rows: fx.Node,
        only: set[fx.Node] | None = None,
    ) -> None:
        """Cut values out of rows that hold them beside each other."""
        first = 0
        for node in values:
            value, dim = node.meta["val"], row_dim(node)
            assert dim is not None
            others = [size for at, size in enumerate(value.shape) if at != dim]
            width = int(torch.Size(others).numel())
            if only is None or node in only:
                piece = graph.call_function(torch.narrow, (memory, 1, first, width))
                shaped = (
                    graph.call_method("view", (piece, rows, *others))
                    if len(values) == 1
                    else (graph.call_method("reshape", (piece, rows, *others)))
                )
                moved = graph.call_function(torch.movedim, (shaped, 0, dim))
                if value.dtype is not self._decoder.dtype or memory.name == "rotation":
                    moved = graph.call_method("to", (moved, value.dtype))
                known[node] = moved
            first += width

    def _copy(self, graph: fx.Graph, nodes: list[fx.Node], known: dict[fx.Node, Any], rows: fx.Node) -> None:
        """Copy nodes; products with matrices of the decoder become calls of these."""
        fused: dict[int, Any] = {}

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
                raise CannotCutError(f"{node.name} is needed where it is not known")
            return known[node]

        for node in nodes:
            name, given = name_of(node), _nodes_of(node)
            weight = self._graph.parameters.get(given[1]) if name == "linear" else None
            if name == "embedding" and self._graph.parameters.get(given[0]) == self._outline.embedding:
                look_up = self._attribute("look_up", _LookUp(self._decoder))
                known[node] = graph.call_module(look_up, (find(given[1]),))
            elif weight in self._products:
                linear, rows_of, index = self._products[weight]
                if id(linear) not in fused:
                    module = self._attribute("product", _Product(linear, rows_of))
                    fused[id(linear)] = graph.call_module(module, (find(given[0]),))
                result = fused[id(linear)]
                known[node] = result if len(rows_of) == 1 else graph.call_function(getitem, (result, index))
            else:
                copied = graph.node_copy(node, find)
                copied.args = self._here(copied.args)
                copied.kwargs = self._here(copied.kwargs)
                known[node] = copied

    def _attribute(self, kind: str, value: Any) -> str:
        name = f"{kind}_{self._number_of}"
        self._number_of += 1
        if isinstance(value, Tensor):
            self._root.register_buffer(name, value)
        else:
            self._root.add_module(name, value)
        return name

    def _compiled(self, graph: fx.Graph, results: Any) -> Code:
        graph.output(results)
        module = fx.GraphModule(self._root, graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module.forward


def _nodes_of(node: fx.Node) -> list[Any]:
    """Return a node's arguments."""
    return list(node.args)
