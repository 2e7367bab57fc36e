"""Ranks while they are set up: what they have to agree on."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.ranks.messages import (
    Agreed,
    Beginning,
    Connected,
    Fitting,
    Join,
    Loaded,
    Reach,
    Reached,
)
from neo_desktop.engine.frames import FrameWriter
from neo_desktop.engine.placement import Place
from neo_desktop.engine.remote.link import Address
from neo_desktop.engine.remote.rank_link import EngineRank
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.models.rank import Rank

T = TypeVar("T")


class Member(Protocol):
    """One rank among others, as set-up sees it."""

    rank: Rank

    @property
    def engine_rank(self) -> EngineRank:
        """What workers know it by."""

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts, and make their group.

        Args:
            dtype: of this rank's part.
            device: of this rank.

        Raises:
            RuntimeError: a rank has ended, or chose another dtype.
        """

    def agreed(self, fitting: Mapping[Place, int]) -> dict[Place, int]:
        """Tell how many blocks find room; return how many do so on all ranks."""

    def connect(self, workers: Workers) -> dict[Place, int]:
        """Let all ranks connect to the workers that can be reached; return how many blocks each has.

        Raises:
            ConnectionError: a worker refuses.
        """


class Follower:
    """A rank other than 0, in its own process.

    Args:
        beginning: what it was told.
        messages: of rank 0, to come.
        writer: to rank 0.
    """

    def __init__(self, beginning: Beginning, messages: Iterator[Any], writer: FrameWriter) -> None:
        self.rank = beginning.rank
        self.group: Group | None = None  # once it is made
        self.messages = messages
        self._beginning = beginning
        self._writer = writer
        self._addresses: dict[Place, Sequence[Address]] = {}  # of workers, as rank 0 knows them

    @property
    def engine_rank(self) -> EngineRank:
        """See `Member`."""
        return EngineRank(self._beginning.engine, self.rank, others=None)

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Member`, likewise the next one."""
        self.tell(Loaded(str(dtype)))
        self._next(Join)
        self.group = Group(self.rank, self._beginning.folder, device, self._beginning.patience_s)

    def agreed(self, fitting: Mapping[Place, int]) -> dict[Place, int]:  # noqa: D102
        self.tell(Fitting(fitting))
        return dict(self._next(Agreed).blocks)

    def finders(self, count: int, by_heads: bool) -> list[Callable[[], Address]]:
        """Return what tells where workers listen, once rank 0 has said it.

        Args:
            count: of workers.
            by_heads: whether they are one place.
        """
        if by_heads:
            return [partial(self._address, Place.worker(1), index) for index in range(count)]
        return [partial(self._address, Place.worker(number), 0) for number in range(1, count + 1)]

    def _address(self, place: Place, index: int) -> Address:
        return self._addresses[place][index]

    def connect(self, workers: Workers) -> dict[Place, int]:
        """See `Member`."""
        while not isinstance(message := next(self.messages), Connected):
            self.reach(workers, message)
        return dict(message.blocks)

    def reach(self, workers: Workers, message: Reach) -> None:
        """Connect to a worker that is not used meanwhile, in a thread, and tell rank 0 how that went."""

        def connect() -> None:
            try:
                self.tell(Reached(workers.open(message.place)))
            except OSError as error:
                self.tell(Reached(0, str(error)))

        self._addresses[message.place] = message.addresses
        threading.Thread(target=connect, name=f"reach {message.place}", daemon=True).start()

    def tell(self, message: object) -> None:
        """Tell rank 0 something."""
        self._writer.put(message)

    def _next(self, kind: type[T]) -> T:
        message = next(self.messages)
        if not isinstance(message, kind):
            raise TypeError(f"rank 0 said {message}, where a {kind.__name__} was expected")
        return message
