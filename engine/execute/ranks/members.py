"""Ranks while they are set up: what they have to agree on."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch

from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.ranks.messages import (
    Agreed,
    Beginning,
    Fitting,
    Join,
    Loaded,
)
from neo_desktop.engine.frames import FrameWriter
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.rank import Rank

T = TypeVar("T")


class Member(Protocol):
    """One rank among others, as set-up sees it."""

    rank: Rank

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts, and make their group.

        Args:
            dtype: of this rank's part.
            device: of this rank.

        Raises:
            RuntimeError: a rank has ended, or chose another dtype.
        """

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        """Tell how many blocks find room; return how many do so on all ranks."""


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

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Member`, likewise the next one."""
        self.tell(Loaded(str(dtype)))
        self._next(Join)
        self.group = Group(self.rank, self._beginning.folder, device, self._beginning.timeout_s)

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        self.tell(Fitting(fitting))
        return dict(self._next(Agreed).blocks)

    def tell(self, message: object) -> None:
        """Tell rank 0 something."""
        self._writer.put(message)

    def _next(self, kind: type[T]) -> T:
        message = next(self.messages)
        if not isinstance(message, kind):
            raise TypeError(f"rank 0 said {message}, where a {kind.__name__} was expected")
        return message
