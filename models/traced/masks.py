"""Which numbers of its inputs an operator needs for some numbers of its result.

Values are seen without their rows, all of which are needed: as tensors in which that dimension is 1. A mask
says for each number whether it is needed; None: all of them are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models.traced.rows import ELEMENTWISE, MOVES, is_tensor, is_value, name_of, tensors_of

Mask = Tensor | None
Needs = list[tuple[fx.Node, Mask]]

FOLLOWED = MOVES | {"stack", "index"}  # what puts numbers elsewhere, by places that are known
_OVER_DIMS = frozenset(("mean", "sum", "softmax", "var", "std", "amax", "amin", "max", "min"))
_OF_LAST = frozenset(("layer_norm", "rms_norm"))
# Those that need another mask, or one of the first input alone.
_NARROWER: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_complex": lambda mask: mask.unsqueeze(-1).expand(*mask.shape, 2),
    "view_as_real": lambda mask: mask.any(-1),
    "type_as": lambda mask: mask,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the places along one dimension of a value, in order; all of the others."""

    dim: int
    places: tuple[int, ...]

    @property
    def runs(self) -> tuple[slice, ...]:
        """Places that follow each other."""
        starts = [at for at, place in enumerate(self.places) if not at or self.places[at - 1] != place - 1]
        ends = [*starts[1:], len(self.places)]
        return tuple(
            slice(self.places[start], self.places[end - 1] + 1)
            for start, end in zip(starts, ends, strict=True)
        )

    def before(self, place: int) -> int:
        """Return how many of its places come before one."""
        return sum(each < place for each in self.places)

    def of(self, value: Tensor) -> Tensor:
        """Return these numbers of a value without rows."""
        return value.index_select(self.dim, torch.tensor(self.places, dtype=torch.int64))

    def mask(self, shape: torch.Size) -> Tensor:
        """Return what says so, of a value of this shape."""
        line = torch.zeros(shape[self.dim], dtype=torch.bool)
        line[list(self.places)] = True
        return line.view(-1, *[1] * (len(shape) - self.dim - 1)).expand(shape)


def part_of(mask: Tensor) -> Part | None:
    """Return the part that a mask says; None: it is none, but all, nothing, or of several dimensions."""
    return next((part for part in _around(mask) if torch.equal(part.mask(mask.shape), mask)), None)


def _around(mask: Tensor) -> Iterator[Part]:
    """Yield, for each dimension, the part that has all numbers of a mask, unless it is nothing or all."""
    for dim, size in enumerate(mask.shape):
        places = tuple(mask.movedim(dim, 0).reshape(size, -1).any(1).nonzero().flatten().tolist())
        if 0 < len(places) < size:
            yield Part(dim, places)


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's value without rows."""
    return torch.Size([size if isinstance(size, int) else 1 for size in node.meta["val"].shape])


def needed(node: fx.Node, mask: Tensor, known: Mapping[fx.Node, Tensor]) -> Needs | None:
    """Return what a node needs of its inputs to compute a part of its value; None: that cannot be told.

    Args:
        node: one whose value is a tensor.
        mask: of its value.
        known: inputs of the graph that tell places.
    """
    name, inputs = name_of(node), tensors_of(node)
    if name in FOLLOWED:
        return _moved(node, [each for each in inputs if each not in known], mask, known)
    if not all(is_tensor(each) for each in inputs):
        return None
    if name in _OF_LAST or (name in _OVER_DIMS and not _is_of_two(node)):
        return _reduced(node, inputs, mask)
    if name in _NARROWER:
        return [(inputs[0], _NARROWER[name](mask))]
    if name in ELEMENTWISE | _OVER_DIMS and not name.endswith("_") and not name.startswith("new_"):
        return [(each, _broadcast(mask, shape_of(each))) for each in inputs]
    return None


def without_rows(node: fx.Node, given: Callable[[fx.Node], Any]) -> Any:
    """Return what a node computes, of values without rows.

    Args:
        given: returns the value of an input; of sizes that depend on the rows it is not asked.
    """

    def find(each: fx.Node) -> Any:
        if is_value(each):
            return given(each)
        return 1 if name_of(each).startswith("sym_size") else without_rows(each, given)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), find)
    target: Any = node.target
    return target(*args, **kwargs)


def addresses_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
    """Number all numbers of some values without rows."""
    found, first = dict[fx.Node, Tensor](), 0
    for each in nodes:
        shape = shape_of(each)
        found[each] = torch.arange(first, first + shape.numel()).view(shape)
        first += shape.numel()
    return found


def _moved(node: fx.Node, inputs: list[fx.Node], mask: Tensor, known: Mapping[fx.Node, Tensor]) -> Needs:
    """Follow the numbers by their addresses.

    Of an input of which not all is used, as by a slice, the part that is needed may have more than that.
    """
    addresses = addresses_of(inputs)
    moved = without_rows(node, lambda each: known[each] if each in known else addresses[each])
    count, needs = sum(each.numel() for each in addresses.values()), Needs()
    taken, used = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    taken[moved[mask]] = used[moved] = True
    for each, at in addresses.items():
        of_it, of_all = taken[at], used[at]
        parts = (part.mask(at.shape) for part in _around(of_it))
        needs.append((each, next((part for part in parts if torch.equal(part & of_all, of_it)), of_it)))
    return needs


def _is_of_two(node: fx.Node) -> bool:
    """Return whether it is the smaller or the larger of two."""
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node)


def _reduced(node: fx.Node, inputs: list[fx.Node], mask: Tensor) -> Needs | None:
    x, *others = inputs
    shape, given = shape_of(x), node.args[1] if len(node.args) > 1 else None
    if given is None:
        return None
    over: Any = range(-len(given), 0) if name_of(node) in _OF_LAST else given  # type: ignore[arg-type]
    dims = sorted(dim % len(shape) for dim in ([over] if isinstance(over, int) else over))
    if mask.dim() < len(shape):
        for dim in dims:
            mask = mask.unsqueeze(dim)
    whole = mask.any(dim=dims, keepdim=True)
    if not torch.equal(whole.expand(mask.shape), mask):  # a part of what is computed together
        return None
    return [(x, whole.expand(shape)), *((each, None) for each in others)]


def _broadcast(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return which numbers of a value that was broadcast are needed."""
    while mask.dim() > len(shape):
        mask = mask.any(0)
    dims = [dim for dim, size in enumerate(shape) if size == 1 and mask.shape[dim] > 1]
    return mask.any(dim=dims, keepdim=True) if dims else mask
