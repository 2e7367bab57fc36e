"""Patterns of operators in a graph that one of the decoder's operators can replace."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.rows import name_of, row_dim

P = TypeVar("P", bound="Pattern")
_MOVES = frozenset(("view", "transpose", "alias", "reshape", "to"))  # no arithmetic


@dataclass(slots=True)
class Norm:
    """An RMSNorm over the last dimension; with `residual`, of a sum."""

    covered: set[fx.Node]
    root: fx.Node  # the result
    x: fx.Node
    weight: fx.Node | None  # None: a norm without weights
    eps: float
    is_rounded_before: bool  # round to the model's dtype before multiplying with the weight
    residual: fx.Node | None = None  # the other summand
    total: fx.Node | None = None  # the sum
    in_place: bool = False  # the sum may overwrite the residual


@dataclass(slots=True)
class Gate:
    """silu(gate) * up, from one fused matmul."""

    covered: set[fx.Node]
    root: fx.Node
    gate: fx.Node  # a matmul: the gates, or gates and ups


@dataclass(slots=True)
class Rope:
    """RoPE of heads [1, heads, rows, head_dim], after an optional norm."""

    covered: set[fx.Node]
    root: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    norm: Norm | None
    rows_first: bool  # x is [1, rows, heads, head_dim]
    in_place: bool  # nothing else reads x


Pattern = Norm | Gate | Rope


class Part(NamedTuple):
    """A part of a fused matmul."""

    linear: Linear
    rows: tuple[int, ...]  # of every part
    place: int  # of this part


def _tried(find: Callable[..., P | None], *given: Any) -> P | None:
    """Search for a pattern; operators with unexpected arguments do not match."""
    try:
        return find(*given)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, CannotCutError):
        return None


@dataclass(slots=True)
class Finder:
    """Finds the patterns of a piece.

    Args:
        constants: weights, and nodes that depend on weights only.
        rotations: nodes that depend on positions only.
        carried: the piece's inputs.
        handed_on: the piece's results: for attention, and for the next piece.
        products: matmuls.
    """

    nodes: list[fx.Node]  # in order
    constants: Collection[fx.Node]
    rotations: Collection[fx.Node]
    carried: Collection[fx.Node]
    handed_on: Collection[fx.Node]
    products: Mapping[fx.Node, Part]
    dtype: torch.dtype
    _inside: set[fx.Node] = field(init=False)
    _fresh: set[fx.Node] = field(default_factory=set)  # results of norms

    def __post_init__(self) -> None:
        self._inside = set(self.nodes)

    def patterns(self) -> list[Pattern]:
        """Return the patterns, without overlaps."""
        norms = self.norms()
        ropes = [rope for node in self.nodes if (rope := _tried(self.rope, node, norms)) is not None]
        merged = {id(rope.norm) for rope in ropes}
        gates = [gate for node in self.nodes if (gate := _tried(self.gate, node)) is not None]
        left = [norm for norm in norms if id(norm) not in merged]
        for norm in left:
            self.add_residual(norm, left)
        return [*left, *gates, *ropes]

    def norms(self) -> list[Norm]:
        """Return all norms, in order; of norms with shared nodes, the longest."""
        norms, covered = list[Norm](), set[fx.Node]()
        for node in reversed(self.nodes):
            norm = None if node in covered else _tried(self.norm, node)
            if norm is not None:
                norms.insert(0, norm)
                covered |= norm.covered
        self._fresh = {norm.root for norm in norms}
        return norms

    def norm(self, root: fx.Node) -> Norm | None:
        """Return the norm with this result."""
        end = _node(root, 0) if self._is(root, "to", "type_as") else root
        is_rounded_last = end is not root
        weight, normed = self._factors(end)
        if normed in self.constants:
            weight, normed = normed, weight
        if weight not in self.constants:
            weight, normed = None, end
        elif _shape(weight) != _shape(root)[-1:]:
            return None
        scaled = normed
        if self._is(normed, "to") and not is_rounded_last and _dtype(normed) is self.dtype:
            scaled = _node(normed, 0)
        wide, root_mean = self._factors(scaled)
        if self._is(wide, "rsqrt"):
            wide, root_mean = root_mean, wide
        chain = [root_mean]
        for name in ("rsqrt", "add", "mean"):
            chain.append(_node(chain[-1], 0) if self._is(chain[-1], name) else None)
        _, plus, mean, power = chain
        if not self._is(power, "pow") or power.args != (wide, 2):
            return None
        x = _node(wide, 0) if self._is(wide, "to") and _dtype(wide) is torch.float32 else wide
        covered = {root, end, normed, scaled, *chain, *({wide} - {x})}
        eps, is_over_last = plus.args[1], list(mean.args[1]) == [-1] and mean.args[2:3] == (True,)
        is_typed = _dtype(x) is _dtype(root) and isinstance(eps, float)
        is_typed = is_typed and (_dtype(x) is self.dtype or weight is None)
        if not is_over_last or not is_typed or not self._is_closed(covered, root):
            return None
        is_rounded_before = not is_rounded_last or _dtype(x) is torch.float32
        return Norm(covered, root, x, weight, eps, is_rounded_before)

    def _factors(self, node: Any) -> tuple[Any, Any]:
        return (_node(node, 0), _node(node, 1)) if self._is(node, "mul") else (None, None)

    def add_residual(self, norm: Norm, norms: list[Norm]) -> None:
        """Extend a norm's pattern by the sum before it."""
        total = norm.x
        if not norm.is_rounded_before or not self._is(total, "add") or total.kwargs.get("alpha", 1) != 1:
            return
        one, other = total.args
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return
        if {_shape(one), _shape(other)} != {_shape(total)} or len(_shape(total)) != 3:
            return
        if {_dtype(one), _dtype(other)} != {self.dtype}:
            return
        own = {*self.carried} | {previous.total for previous in norms if previous.total is not None}
        if one not in own and other in own:
            one, other = other, one
        norm.residual, norm.total, norm.x = one, total, other
        norm.covered.add(total)
        # Other readers of the residual have read it already if it is the sum of an earlier norm.
        readers = {user for user in one.users if user in self._inside and user is not total}
        before = {node for previous in norms if previous.total is one for node in previous.covered}
        norm.in_place = one in own and one not in self.handed_on and readers <= before

    def gate(self, root: fx.Node) -> Gate | None:
        """Return the gated activation with this result."""
        silu, up = self._factors(root)
        if not self._is(silu, "silu"):
            silu, up = up, silu
        gate = _node(silu, 0) if self._is(silu, "silu") else None
        if gate is None:
            return None
        covered, product = {root, silu}, gate
        halves = self._halves(gate, up)
        if halves is not None:  # halves of one matmul
            product, covered = _node(halves[0], 0), covered | {*halves, gate, up}
            is_pair = set(product.users) == set(halves) and len(self.products[product].rows) == 1
        else:
            first, second = self.products[gate], self.products[up]
            is_pair = first.linear is second.linear and (first.place, second.place) == (0, 1)
            is_pair = is_pair and len(first.rows) == 2 and first.rows[0] == first.rows[1]
            is_pair = is_pair and set(gate.users) == {silu} and set(up.users) == {root}
        return Gate(covered, root, product) if is_pair and self._is_closed(covered, root) else None

    def _halves(self, gate: fx.Node, up: Any) -> tuple[fx.Node, ...] | None:
        """Return the nodes that cut a value into these two halves: slices, or the chunk of two items."""
        if self._is(gate, "getitem") and self._is(up, "getitem"):
            both = _node(gate, 0)
            is_half = self._is(both, "chunk") and both is _node(up, 0) and tuple(both.args[1:]) == (2, -1)
            return (both,) if is_half and (gate.args[1], up.args[1]) == (0, 1) else None
        if not self._is(gate, "slice") or not self._is(up, "slice"):
            return None
        both, size = _node(gate, 0), _shape(gate)[-1]
        are_halves = self._is_slice(gate, both, 0, size) and self._is_slice(up, both, size, 2 * size)
        return (gate, up) if are_halves and _shape(both)[-1] == 2 * size else None

    def rope(self, root: fx.Node, norms: list[Norm]) -> Rope | None:
        """Return the RoPE with this result: x * cos + (x with its halves swapped) * sin."""
        if not self._is(root, "add") or len(_shape(root)) != 4:
            return None
        (x, cos), (swapped, sin) = self._factors(root.args[0]), self._factors(root.args[1])
        size = _shape(root)[-1]
        halves: Any = swapped.args[0] if self._is(swapped, "cat") and swapped.args[1:] == (-1,) else ()
        minus, low = halves if len(halves) == 2 else (None, None)
        high = _node(minus, 0) if self._is(minus, "neg") else None
        if not self._is_slice(low, x, 0, size // 2) or not self._is_slice(high, x, size // 2, size):
            return None
        covered = {root, *root.args, swapped, minus, low, high}
        # x is [1, heads, rows, head_dim]; some models rotate [1, rows, heads, head_dim].
        rows_of_cos = row_dim(cos)
        are_rows_third = row_dim(x) == 2 and rows_of_cos is not None and len(_shape(cos)) - rows_of_cos == 2
        is_turned = {cos, sin}.issubset(self.rotations) and size == _shape(cos)[-1] == _shape(sin)[-1]
        is_turned = is_turned and are_rows_third
        is_typed = _shape(x) == _shape(root) and _dtype(x) is self.dtype
        if not is_turned or not is_typed or not self._is_closed(covered, root):
            return None
        norm, rows_first = None, False
        for each in norms:
            moved = self._is(x, "transpose") and x.args[0] is each.root and set(x.args[1:]) == {1, 2}
            inner = covered | each.covered | ({x} if moved else set())
            if each.is_rounded_before and (moved or x is each.root) and self._is_closed(inner, root):
                norm, rows_first = each, moved
                covered, x = inner, each.x
                break
        return Rope(covered, root, x, cos, sin, norm, rows_first, self._is_own(x, covered))

    def _is_own(self, x: fx.Node, readers: set[fx.Node]) -> bool:
        """Return True if only these nodes read x, and a matmul or norm has written it to new memory."""
        while set(x.users) <= readers and x not in self.handed_on:
            if x in self.products or x in self._fresh:
                return True
            if not self._is(x, *_MOVES):
                return False
            readers, x = {x}, _node(x, 0)
        return False

    def _is_slice(self, node: Any, of: fx.Node, first: int, last: int) -> bool:
        if not self._is(node, "slice") or node.args[0] is not of:
            return False
        dim, *range_ = node.args[1:]
        end = min(range_[1], _shape(of)[-1]) if len(range_) > 1 else _shape(of)[-1]
        return dim % 4 == 3 and (range_[0], end) == (first, last) and len(range_) == 2

    def _is(self, node: Any, *names: str) -> bool:
        return isinstance(node, fx.Node) and node in self._inside and name_of(node) in names

    def _is_closed(self, covered: set[fx.Node], root: fx.Node) -> bool:
        """Return True if no outside node reads an inner node."""
        inner = covered - {root}
        return inner.isdisjoint(self.handed_on) and all(set(node.users) <= covered for node in inner)


def _node(node: Any, place: int) -> Any:
    return node.args[place] if len(node.args) > place else None


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        return ()
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)
