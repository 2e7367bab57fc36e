"""A graph of which one of several ranks computes its part.

Each rank attends with its heads. What it needs for them is followed back through the graph (`masks`): where
that ends at a product, the rank has these rows of its matrix. The same is done with a part of the numbers
that other products multiply: where it ends at products again, as with a feed-forward network, the rank has
the rows of these, and the columns of the product; so it has of products with what attention gives. What
products with columns give is a part of a sum over all ranks. All else every rank computes: where it needs a
part of that, a slice is taken; and where it needs all of what attention gives, that is gathered.

Megatron-LM's division is the same (`models.ranks`), but is written down for each model.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor, fx

from neo_desktop.models.experts_config import EXPERT_UNIT
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.rank import Rank, Runs, num_places
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.cut import only
from neo_desktop.models.traced.graph import Exported, exported
from neo_desktop.models.traced.localised import localise, of_part, slice_splits, sliced
from neo_desktop.models.traced.masks import (
    FOLLOWED,
    Mask,
    Needs,
    Part,
    addresses_of,
    needed,
    part_of,
    shape_of,
    without_rows,
)
from neo_desktop.models.traced.rows import is_tensor, name_of, tensors_of
from neo_desktop.models.traced.sizes import Fused, Outline
from neo_desktop.models.traced.source import Source


@dataclass(frozen=True, slots=True)
class Division:
    """What a rank has of the matrices that are divided, by the names of their weights."""

    rows: dict[str, Runs]
    columns: dict[str, Runs]


@lru_cache(maxsize=64)
def division(source: Source, outline: Outline, rank: Rank) -> Division:
    """Return what a rank has of a model.

    Raises:
        ModelError: it cannot be divided.
    """
    graph = exported(source, torch.float32, outline.aliases)
    try:
        found = divide(graph, outline, rank)
        for gate, up, down in (mixture.matrices for mixture in outline.mixtures):
            inner = rank.inner_part(down.columns, EXPERT_UNIT)
            if inner.start == inner.stop:
                raise CannotCutError("its experts are too small")
            found.rows.update(dict.fromkeys((*gate.weights, *up.weights), (inner,)))
            found.columns.update(dict.fromkeys(down.weights, (inner,)))
    except CannotCutError as error:
        raise ModelError(
            f"{source.named} describes a model that cannot be divided among {rank.count} processes: {error}. "
            "Choose another number for --tensor-parallel."
        ) from None
    return found


def divide(graph: Exported, outline: Outline, rank: Rank) -> Division:
    """Let a graph compute a rank's part.

    Args:
        graph: of the whole model; it is changed. What products with columns give is added up by nobody.
        outline: of the model, or of a rank's part.
        rank: whose part.

    Raises:
        CannotCutError: it cannot be divided.
    """
    slice_splits(graph.graph)
    divider = _Divider(graph, outline, rank)
    found = divider.division()
    divider.rewrite()
    return found


def part_of_outline(outline: Outline, division: Division, rank: Rank) -> Outline:
    """Return what a rank's part of a model consists of."""

    def size(runs: Runs | None, whole: int) -> int:
        return whole if runs is None else num_places(runs)

    def of_fused(fused: Fused) -> Fused:
        each = zip(fused.weights, fused.rows, strict=True)
        rows = tuple(size(division.rows.get(weight), whole) for weight, whole in each)
        columns = size(division.columns.get(fused.weights[0]), fused.columns)
        return replace(fused, rows=rows, columns=columns)

    return replace(
        outline,
        matrices=tuple(of_fused(fused) for fused in outline.matrices),
        mixtures=tuple(
            replace(mixed, matrices=tuple(of_fused(fused) for fused in mixed.matrices))
            for mixed in outline.mixtures
        ),
        # Where there is no head, the embedding stands for it, and nobody asks.
        head=outline.head if rank.number == 0 else None,
        heads=outline.heads // rank.count,
        kv_heads=max(outline.kv_heads // rank.count, 1),
    )


class _Divider:
    def __init__(self, graph: Exported, outline: Outline, rank: Rank) -> None:
        self._graph, self._outline, self._rank = graph, outline, rank
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        matrices = {weight for fused in outline.matrices for weight in fused.weights}
        self._weights: dict[fx.Node, str] = {}  # of products with matrices
        for node in self._nodes:
            weight = graph.parameters.get(tensors_of(node)[1]) if name_of(node) == "linear" else None
            if weight is not None and weight in matrices:
                self._weights[node] = weight
        # Weights and positions, and what depends on them alone: all ranks have all of that.
        given = {*graph.parameters, *graph.buffers, graph.positions}
        self._constants = {*given, *only(self._nodes, given)}
        self._known = dict(graph.buffers)  # and what is computed of them
        for node in only(self._nodes, set(graph.buffers)):
            self._known[node] = without_rows(node, self._known.__getitem__)
        self._columns: dict[fx.Node, Part] = {}  # product -> which numbers it multiplies
        self._choose_columns()
        self._gathered: list[fx.Node] = []  # attention of which more than the own heads are needed
        self._parts, self._used = self._divided()

    # What is divided.

    def _choose_columns(self) -> None:
        attended = self._attended()
        for product in self._weights:
            x = tensors_of(product)[0]
            shape = shape_of(x)
            if x in attended:
                part = part_of(attended[x])
            else:
                part = Part(len(shape) - 1, tuple(range(shape[-1])[self._rank.inner_part(shape[-1])]))
            if part is not None and part.dim == len(shape) - 1 and self._ends_at_parts(x, part.mask(shape)):
                self._columns[product] = part

    def _attended(self) -> dict[fx.Node, Tensor]:
        """Return what a rank has of what depends on attention, up to the next products."""
        found: dict[fx.Node, Tensor] = {}
        for node in self._nodes:
            inputs = [each for each in node.all_input_nodes if each in found]
            if name_of(node) == "attention":
                found[node] = self._heads(2, shape_of(node))
            elif not inputs or node in self._weights or not is_tensor(node):
                continue
            elif name_of(node) in FOLLOWED and tensors_of(node) == inputs[:1]:
                found[node] = without_rows(node, lambda each: found[each].contiguous())
            elif all(found[each].shape == shape_of(node) for each in inputs):
                mask = torch.stack([found[each] for each in inputs]).all(0)
                if self._needs(node, mask) is not None:
                    found[node] = mask
        return found

    def _heads(self, dim: int, shape: torch.Size) -> Tensor:
        return Part(dim, tuple(range(shape[dim])[self._rank.part(shape[dim])])).mask(shape)

    def _kv_heads(self, shape: torch.Size) -> Tensor:
        return Part(1, tuple(range(shape[1])[self._rank.kv_part(shape[1])])).mask(shape)

    def _ends_at_parts(self, x: fx.Node, mask: Tensor) -> bool:
        """Return whether some numbers come, without slices, of parts of products and of attention alone."""
        wanted: dict[fx.Node, Mask] = {x: mask}
        todo = [(-self._place[x], x)]
        has_part = False
        while todo:
            _, node = heappop(todo)
            of_node = wanted[node]
            if node in self._constants:
                continue
            if of_node is not None:
                needs = self._needs(node, of_node)
                if needs is None:
                    return False
                has_part = has_part or node in self._weights or name_of(node) == "attention"
            else:
                needs = [(each, None) for each in tensors_of(node)]
            if node in self._weights or name_of(node) == "attention":
                continue
            for each in _want(wanted, needs):
                heappush(todo, (-self._place[each], each))
        return has_part

    def _divided(self) -> tuple[dict[fx.Node, Part], Container[fx.Node]]:
        """Return of which values each rank has a part, and which it needs at all."""
        wanted: dict[fx.Node, Mask] = dict.fromkeys(tensors_of(self._graph.graph.output_node()), None)
        parts: dict[fx.Node, Part] = {}
        for node in reversed(self._nodes):
            if node not in wanted:
                continue
            mask = wanted[node]
            if name_of(node) == "attention":
                own = self._heads(2, shape_of(node))
                if mask is None or not torch.equal(mask, own):
                    self._gathered.append(node)
                mask = own
            needs = None if mask is None else self._needs(node, mask)
            part = None if mask is None else part_of(mask)
            if part is not None and needs is not None:
                parts[node] = part
            else:
                needs = self._needs_of_whole(node)
            _want(wanted, needs)
        return parts, wanted

    def _needs(self, node: fx.Node, mask: Tensor) -> Needs | None:
        """Return what a node needs to compute a part of its value; None: it cannot."""
        if name_of(node) == "attention":
            is_own = torch.equal(mask, self._heads(2, mask.shape))
            q, *kv = tensors_of(node)
            needs: Needs = [(q, self._heads(1, shape_of(q)))]
            needs += [(each, self._kv_heads(shape_of(each))) for each in kv]
            return needs if is_own else None
        if node in self._columns or node in self._constants:
            return None
        if node in self._weights:
            part = part_of(mask)
            is_of_rows = part is not None and part.dim == mask.dim() - 1
            return [(each, None) for each in tensors_of(node)] if is_of_rows else None
        found = needed(node, mask, self._known)
        if found is None or any(each is not None and not _is_usable(each) for _, each in found):
            return None
        used = [(each, of_it) for each, of_it in found if of_it is None or of_it.any()]
        return (
            used if len(used) == len(found) or name_of(node) == "cat" else None
        )  # which can leave something out

    def _needs_of_whole(self, node: fx.Node) -> Needs:
        if node in self._columns:
            x = tensors_of(node)[0]
            return [(x, self._columns[node].mask(shape_of(x)))]
        if name_of(node) in FOLLOWED and node not in self._constants:  # a slice of a part can be all of it
            found = self._needs(node, torch.ones(shape_of(node), dtype=torch.bool))
            parts = [part_of(of_it) for _, of_it in found or () if of_it is not None]
            if found is not None and all(part is None or len(part.runs) == 1 for part in parts):
                return found
        return [(each, None) for each in tensors_of(node)]

    def division(self) -> Division:
        """Return what the rank has of matrices."""
        rows = {
            weight: self._parts[node].runs for node, weight in self._weights.items() if node in self._parts
        }
        columns = {self._weights[node]: part.runs for node, part in self._columns.items()}
        return Division(rows, columns)

    # The rank's graph.

    def rewrite(self) -> None:
        """Let the graph compute parts."""
        graph = self._graph.graph
        slices: dict[tuple[fx.Node, Part], fx.Node] = {}
        values = {node: node.meta["val"] for node in self._nodes if is_tensor(node)}
        for node in self._gathered:
            self._gather(node)
        for node in self._nodes:
            if node in self._used and node.op == "call_function" and is_tensor(node):
                self._rewrite(node, graph, slices)
        for node, part in self._parts.items():
            node.meta["whole"], node.meta["val"] = values[node], of_part(values[node], part)
        graph.eliminate_dead_code()

    def _gather(self, node: fx.Node) -> None:
        """Let what reads a layer's attention read that of all ranks."""
        heads = shape_of(node)[2]
        with self._graph.graph.inserting_after(node):
            given = (node, self._rank.part(heads).start, heads)
            all_of_them = self._graph.graph.call_function(torch.ops.neo_desktop.gathered.default, given)
        all_of_them.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(all_of_them, delete_user_cb=lambda user: user is not all_of_them)

    def _rewrite(self, node: fx.Node, graph: fx.Graph, slices: dict[tuple[fx.Node, Part], fx.Node]) -> None:
        part = self._parts.get(node)
        needs = self._needs_of_whole(node) if part is None else self._needs(node, part.mask(shape_of(node)))
        assert needs is not None
        is_move, known = name_of(node) in FOLLOWED and node not in self._constants, self._known
        addresses = addresses_of(each for each in tensors_of(node) if is_move and each not in known)
        addresses |= known
        whole = without_rows(node, addresses.__getitem__) if is_move else None
        given: dict[fx.Node, Part | None] = {}
        for each, mask in needs:
            wanted, had = None if mask is None else part_of(mask), self._parts.get(each)
            given[each] = had
            if wanted is not None and had is None:
                if (each, wanted) not in slices:
                    slices[each, wanted] = sliced(graph, each, wanted)
                taken = slices[each, wanted]
                node.replace_input_with(each, taken)
                given[taken] = wanted
                if is_move:
                    addresses[taken] = addresses[each]
            elif wanted != had and not is_move:
                raise CannotCutError(f"different parts of {each.name} are needed together")
        if whole is None or (part is None and not any(given.values())):
            return
        localise(node, part, given)
        own = {each: of_it for each, of_it in given.items() if of_it is not None}
        addresses = {each: own[each].of(at) if each in own else at for each, at in addresses.items()}
        try:
            found = without_rows(node, addresses.__getitem__)
        except RuntimeError:
            found = None
        if found is None or not torch.equal(found, whole if part is None else part.of(whole)):
            raise CannotCutError(f"{name_of(node)} cannot be computed in parts")


def _is_usable(mask: Tensor) -> bool:
    """Return whether numbers are all, none, or a part."""
    return bool(mask.all()) or not mask.any() or part_of(mask) is not None


def _want(wanted: dict[fx.Node, Mask], needs: Needs) -> list[fx.Node]:
    """Add what is needed to what is wanted already; return what was not wanted before."""
    new = [each for each, _ in needs if each not in wanted]
    for each, mask in needs:
        before = wanted.setdefault(each, mask)
        wanted[each] = None if before is None or mask is None else before | mask
    return list(dict.fromkeys(new))
