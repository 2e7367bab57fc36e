"""Patterns of operators in a stage's code that one of the decoder's operators replaces."""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from neo_desktop.models.operators import Operators
from neo_desktop.models.traced.builder import Builder
from neo_desktop.models.traced.fused import AddRMSNorm, Gate, RMSNorm, Rope
from neo_desktop.models.traced.rows import name_of, row_dim

_Part = tuple[fx.Node, int, int]
"""A node, and the first number and the length of a part of its last dimension."""


def fused_pieces(
    builder: Builder, count: int, operators: Operators, dtype: torch.dtype
) -> tuple[list[fx.GraphModule], set[fx.Node]]:
    """Return the code of stages with the decoder's operators, and the rotations that are sines.

    The first half of a sine is stored negated. If other operators read it, no rotation is replaced.
    """
    for with_ropes in (True, False):
        fusions = [Fusion(builder.piece(index), operators, dtype, with_ropes) for index in range(count)]
        sines = {sine for each in fusions for sine in each.sines}
        if not any(sines & each.others() for each in fusions):
            break
    return [each.piece for each in fusions], sines


class Fusion:
    """Replaces all patterns in a piece by the decoder's operators; see `Builder.piece`.

    Of patterns with shared nodes it replaces the longest. Operators without readers are removed.
    """

    def __init__(
        self, piece: fx.GraphModule, operators: Operators, dtype: torch.dtype, with_ropes: bool
    ) -> None:
        self.piece, self._graph, self._operators, self._dtype = piece, piece.graph, operators, dtype
        self._count, self._cosines, self.sines = 0, set[fx.Node](), set[fx.Node]()
        self._replace(self.norm)
        self._replace(self.gate)
        if with_ropes:
            self._replace(self.rope)
        self.piece.recompile()

    def others(self) -> set[fx.Node]:
        """Return the rotations that are not, or not only, sines of replaced patterns."""
        return self._cosines | {each.meta["angle"][0] for each in self._graph.nodes if "angle" in each.meta}

    def _replace(self, make: Callable[[fx.Node], fx.Node | None]) -> None:
        for node in reversed(list(self._graph.nodes)):
            with self._graph.inserting_before(node):
                try:
                    made = make(node)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    made = None  # an operator with unexpected arguments
            if made is not None:
                made.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(made)
            if not node.users and not node.is_impure():
                self._graph.erase_node(node)

    def norm(self, root: Any) -> fx.Node | None:
        """Replace an RMSNorm over the last dimension, and the sum before it."""
        end = root.args[0] if _is(root, "to", "type_as") else root
        is_rounded_last = end is not root
        weight, normed = _factors(end)
        if _is_weight(normed):
            weight, normed = normed, weight
        if not _is_weight(weight):
            weight, normed = None, end
        scaled = normed
        if _is(normed, "to") and not is_rounded_last and _dtype(normed) is self._dtype:
            scaled = normed.args[0]
        wide, root_mean = _factors(scaled)
        if _is_inverse_root(wide):
            wide, root_mean = root_mean, wide
        if not _is_inverse_root(root_mean):
            return None
        plus = root_mean.args[0]
        mean, eps = plus.args
        power = mean.args[0]
        if (name_of(plus), name_of(mean), name_of(power)) != ("add", "mean", "pow") or power.args != (
            wide,
            2,
        ):
            return None
        x = wide.args[0] if _is(wide, "to") and _dtype(wide) is torch.float32 else wide
        is_over_last = list(mean.args[1]) == [-1] and mean.args[2:3] == (True,)
        is_typed = _dtype(x) is _dtype(root) and (_dtype(x) is self._dtype or weight is None)
        if not is_over_last or not is_typed or not isinstance(eps, float):
            return None
        width = int(_shape(root)[-1])
        factors = torch.ones(width, dtype=_dtype(x))
        if weight is not None:
            factors = getattr(self.piece, str(weight.target))
        if factors.shape != (width,):
            return None
        is_rounded_before = not is_rounded_last or _dtype(x) is torch.float32
        terms = self._terms(x) if is_rounded_before else None
        if terms is None:
            return self._call(RMSNorm(factors, eps, self._operators, is_rounded_before), x)
        with self._graph.inserting_after(x):
            both = self._call(AddRMSNorm(factors.to(self._dtype), eps, self._operators), *terms)
        with self._graph.inserting_after(both):
            total = self._graph.call_function(getitem, (both, 0))
            result = self._graph.call_function(getitem, (both, 1))
        total.meta["val"] = x.meta["val"]
        x.replace_all_uses_with(total)
        return result

    def _terms(self, total: Any) -> tuple[fx.Node, fx.Node] | None:
        """Return the summands of a sum of hidden states; None: another operator."""
        if not _is(total, "add") or total.kwargs.get("alpha", 1) != 1 or len(_shape(total)) != 3:
            return None
        one, other = total.args
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return None
        is_alike = {_shape(one), _shape(other)} == {_shape(total)}
        return (one, other) if is_alike and {_dtype(one), _dtype(other)} == {self._dtype} else None

    def gate(self, root: Any) -> fx.Node | None:
        """Replace silu(gate) * up of the halves of a value."""
        silu, up = _factors(root)
        if not _is(silu, "silu"):
            silu, up = up, silu
        if not _is(silu, "silu"):
            return None
        both, first, size = _part(silu.args[0])
        if first or _part(up) != (both, size, size) or _shape(both)[-1] != 2 * size:
            return None
        return self._call(Gate(self._operators), both)

    def rope(self, root: Any) -> fx.Node | None:
        """Replace RoPE of heads [1, heads, rows, head_dim]: x * cos + (x with its halves swapped) * sin.

        A norm of the heads before it is included.
        """
        if not _is(root, "add") or len(_shape(root)) != 4:
            return None
        (x, cos), (swapped, sin) = _factors(root.args[0]), _factors(root.args[1])
        (minus, low), half = swapped.args[0], _shape(root)[-1] // 2
        if not _is(swapped, "cat") or swapped.args[1:] != (-1,) or not _is(minus, "neg"):
            return None
        halves = _part(low), _part(minus.args[0])
        cosine, stored_cos = cos.meta["angle"]
        sine, stored_sin = sin.meta["angle"]
        rows_at: Any = row_dim(x)  # x is [1, heads, rows, head_dim], or [1, rows, heads, head_dim]
        are_alike = rows_at in (1, 2) and len(_shape(cos)) - (row_dim(cosine) or 0) == 4 - rows_at
        is_whole = _shape(x) == _shape(root) and {_shape(each)[-1] for each in (x, cos, sin)} == {2 * half}
        is_rotation = halves == ((x, 0, half), (x, half, half)) and are_alike and is_whole
        if not is_rotation or _dtype(x) is not self._dtype:
            return None
        self._cosines.add(cosine)
        self.sines.add(sine)
        inner = x.args[0] if _is(x, "transpose") and set(x.args[1:]) == {1, 2} else x
        norm = self.piece.get_submodule(inner.target) if inner.op == "call_module" else None
        weight, eps = None, 0.0
        if isinstance(norm, RMSNorm) and norm.is_rounded_before:
            weight = norm.weight.to(self._dtype).expand(_shape(x)[3 - rows_at], -1).contiguous()
            x, eps = inner.args[0], norm.eps
        before: Any = row_dim(x)
        return self._call(Rope(weight, eps, (before, rows_at)), x, stored_cos, stored_sin)

    def _call(self, module: nn.Module, *inputs: fx.Node) -> fx.Node:
        name = f"fused_{self._count}"
        self._count += 1
        self.piece.add_module(name, module)
        return self._graph.call_module(name, inputs)


def _is(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and name_of(node) in names


def _is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _is_inverse_root(node: Any) -> bool:
    return _is(node, "rsqrt") or (_is(node, "pow") and node.args[1] == -0.5)


def _factors(node: Any) -> tuple[Any, Any]:
    return (node.args[0], node.args[1]) if _is(node, "mul") else (None, None)


def _part(node: Any) -> _Part:
    """Return the part of another value's last dimension that a node cuts out. Raise ValueError for others."""
    (whole, *place), size = node.args, int(_shape(node)[-1])
    if _is(node, "slice", "narrow"):
        dim, first, *end = place
        if dim % len(_shape(node)) == len(_shape(node)) - 1 and len(end) < 2:  # without steps
            return whole, first, size
    if _is(node, "getitem") and _is(whole, "chunk") and tuple(whole.args[1:]) == (2, -1):
        return whole.args[0], place[0] * size, size
    raise ValueError(f"{name_of(node)} cuts nothing out")


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in node.meta["val"].shape)
