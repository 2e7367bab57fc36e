"""The ranks during set-up, when they agree on types and block counts."""

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
    """The interface of a rank for set-up."""

    rank: Rank

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts, and form the group.

        Args:
            dtype: Type of this rank's part.
            device: Device of this rank.

        Raises:
            RuntimeError: A rank has ended or chose another dtype.
        """

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        """Return the block counts that fit on all ranks, given the counts that fit on this one."""


class Follower:
    """A rank other than 0, in its own process.

    Args:
        beginning: The first message from rank 0.
        messages: Further messages from rank 0.
        writer: Writer of messages to rank 0.
    """

    def __init__(self, beginning: Beginning, messages: Iterator[Any], writer: FrameWriter) -> None:
        self.rank = beginning.rank
        self.group: Group | None = None  # set by `join`
        self.messages = messages
        self._beginning = beginning
        self._writer = writer

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        self.tell(Loaded(str(dtype)))
        self._next(Join)
        self.group = Group(self.rank, self._beginning.folder, device, self._beginning.timeout_s)

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        self.tell(Fitting(fitting))
        return dict(self._next(Agreed).blocks)

    def tell(self, message: object) -> None:
        self._writer.put(message)

    def _next(self, kind: type[T]) -> T:
        message = next(self.messages)
        if not isinstance(message, kind):
            raise TypeError(f"rank 0 sent {message} instead of {kind.__name__}")
        return message
