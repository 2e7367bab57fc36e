"""CPU async decodes: each turn of the device over the layers takes them one layer further."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from neo_desktop.engine.request import RequestState

R = TypeVar("R", bound=RequestState)


class AsyncGroups(Generic[R]):
    """Decodes of the host on their way through the layers, by the layer whose attention they wait for.

    A turn is an iteration that takes them along: those at layer l join the linear stages between layers l and
    l + 1, and the host has until the next turn to attend for layer l + 1. A decode that begins in one turn
    has its token `num_layers` turns later. It keeps its slot, its tier among those of its layer.

    Args:
        num_layers: of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.num_waits = 0  # iterations since the last turn
        self._at: list[list[R | None]] = [[] for _ in range(num_layers)]
        self._members: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: R) -> bool:
        return request.request_id in self._members

    def __iter__(self) -> Iterator[R]:
        return iter(self._members.values())

    def stages(self, new_async: Sequence[R]) -> list[tuple[R | None, ...]]:
        """Return who would join each linear stage in a turn: first who begins, last who gets a token."""
        stages: list[list[R | None]] = [list(new_async), *self._at]
        num_slots = max(map(len, stages))
        return [(*stage, *[None] * (num_slots - len(stage))) for stage in stages]

    def turn(self, new_async: Sequence[R]) -> list[R]:
        """Take everybody one layer further; return those who have passed the last one."""
        self.num_waits = 0
        self._at.insert(0, list(new_async))
        self._members.update((request.request_id, request) for request in new_async)
        ended = [request for request in self._at.pop() if request is not None]
        for request in ended:
            del self._members[request.request_id]
        return ended

    def drop(self, request: R) -> None:
        """Forget how far a request has come, if it is one of them: its token begins again."""
        if self._members.pop(request.request_id, None) is None:
            return
        for group in self._at:
            if request in group:
                group[group.index(request)] = None

    def clear(self) -> None:
        """Forget all."""
        self._members.clear()
        self._at = [[] for _ in range(self.num_layers)]
