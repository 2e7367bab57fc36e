"""The ranks during set-up, when they agree on types and block counts, through pipes.

    rank 0                                  another rank: engine/follower.py
    ──────                                  ────────────────────────────────
    Beginning ──────────────── stdin ─────→ loads its part.
    (has loaded its own) ←──── stdout ───── its dtype
    the dtype of all ─────────────────────→ joins the group, like rank 0; measures free memory.
    ←────────────────────────────────────── the block counts that fit
    the minimum ──────────────────────────→ allocates memory.
    (profiles, alone)
    ←────────────────────────────────────── True: it waits for plans
    True ─────────────────────────────────→
    IterationPlan, repeatedly ────────────→ executes the plans.
    a number, after its own error ────────→ (has executed all earlier plans)
    ←────────────────────────────────────── the same number
    end of stdin ─────────────────────────→ ends.

A failing rank sends its error, and its process ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.frames import FrameWriter
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.rank import Rank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first message to a rank."""

    options: EngineOptions
    rank: Rank
    folder: Path  # rendezvous of the ranks
    timeout_s: float  # timeout of an all-reduce
    sys_path: Sequence[str]
    log_level: int
    limits: Sequence[tuple[str, str, str]]  # limits of fallbacks: mechanism, level, reason


class Member(ABC):
    """A rank during set-up."""

    def __init__(self, rank: Rank, folder: Path, timeout_s: float) -> None:
        self.rank = rank
        self.group: Group | None = None  # set by `join`
        self._folder = folder
        self._timeout_s = timeout_s

    @abstractmethod
    def exchange(self, mine: T, combine: Callable[[Sequence[T]], T]) -> T:
        """Send a value to rank 0; return its combination of every rank's value, its own first.

        Raises:
            RuntimeError: A rank has ended.
        """

    def join(self, dtype: torch.dtype, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts, and form the group.

        Raises:
            RuntimeError: A rank has ended or chose another dtype.
        """
        self.exchange(str(dtype), _common_dtype)
        self.group = Group(self.rank, self._folder, device, self._timeout_s)

    def agreed(self, fitting: Mapping[KVTier, int]) -> dict[KVTier, int]:
        """Return the block counts that fit on all ranks, given the counts that fit on this one."""
        return self.exchange(dict(fitting), _least)


class Follower(Member):
    """A rank other than 0, in its own process.

    Args:
        messages: From rank 0, after the first one.
        writer: Writer of messages to rank 0.
    """

    def __init__(self, beginning: Beginning, messages: Iterator[Any], writer: FrameWriter) -> None:
        super().__init__(beginning.rank, beginning.folder, beginning.timeout_s)
        self.messages = messages
        self.tell = writer.put

    def exchange(self, mine: T, combine: Callable[[Sequence[T]], T]) -> T:
        self.tell(mine)
        result: T = next(self.messages)
        return result


def _common_dtype(dtypes: Sequence[str]) -> str:
    for other in dtypes:
        if other != dtypes[0]:
            raise RuntimeError(f"parts of the model were loaded in {dtypes[0]} and {other}: choose a --dtype")
    return dtypes[0]


def _least(fitting: Sequence[dict[KVTier, int]]) -> dict[KVTier, int]:
    return {tier: min(blocks[tier] for blocks in fitting) for tier in fitting[0]}
