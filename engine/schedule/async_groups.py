"""CPU async decodes: each async step advances them by one layer."""

from collections.abc import Iterator, Sequence
from typing import Generic

from neo_desktop.engine.request import R, RequestState


class AsyncGroups(Generic[R]):
    """Async decodes in flight, grouped by the layer whose attention is pending.

    An async step is an iteration that advances them. Decodes at layer l join the linear stages between
    layers l and l + 1; the host then has until the next async step to attend for layer l + 1. A decode
    produces its token `num_layers` async steps after its start. Until then it keeps its slot, the position in
    its group.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.num_waits = 0  # iterations since the last async step
        self._at: list[list[R | None]] = [[] for _ in range(num_layers)]
        self._members: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, RequestState) and request.request_id in self._members

    def __iter__(self) -> Iterator[R]:
        return iter(self._members.values())

    def stages(self, new_async: Sequence[R]) -> list[tuple[R | None, ...]]:
        """Return the requests at each linear stage of an async step: new ones first, finishing ones last."""
        stages: list[list[R | None]] = [list(new_async), *self._at]
        num_slots = max(map(len, stages))
        return [(*stage, *[None] * (num_slots - len(stage))) for stage in stages]

    def turn(self, new_async: Sequence[R]) -> list[R]:
        """Advance all decodes by one layer; return those that have passed the last layer."""
        self.num_waits = 0
        self._at.insert(0, list(new_async))
        self._members.update((request.request_id, request) for request in new_async)
        ended = [request for request in self._at.pop() if request is not None]
        for request in ended:
            del self._members[request.request_id]
        return ended

    def drop(self, request: R) -> None:
        """Discard a request's progress, if it is in flight: its token must be computed from layer 0."""
        if self._members.pop(request.request_id, None) is None:
            return
        for group in self._at:
            if request in group:
                group[group.index(request)] = None

    def clear(self) -> None:
        self._members.clear()
        self._at = [[] for _ in range(self.num_layers)]
