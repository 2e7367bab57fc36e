"""Messages between rank 0 and the other ranks through pipes, in addition to all-reduces.

    rank 0                                  another rank: engine/follower.py
    ──────                                  ────────────────────────────────
    Beginning ──────────────── stdin ─────→ loads its part.
    (has loaded its own) ←──── stdout ───── Loaded
    Join ─────────────────────────────────→ joins the group, like rank 0; measures free memory.
    ←────────────────────────────────────── Fitting
    Agreed, the minimum ──────────────────→ allocates memory.
    (profiles, alone)
    ←────────────────────────────────────── Ready
    IterationPlan, repeatedly ────────────→ executes the plans.
    Question, after its own error ────────→ (has executed all earlier plans)
    ←────────────────────────────────────── the same Question
    end of stdin ─────────────────────────→ ends.

A failing rank sends Failed, and its process ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.rank import Rank


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has loaded its part."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Fitting:
    """Block counts that fit on a rank."""

    blocks: Mapping[KVTier, int]


@dataclass(frozen=True, slots=True)
class Agreed:
    """Block counts that every rank uses."""

    blocks: Mapping[KVTier, int]


@dataclass(frozen=True, slots=True)
class Join:
    """All ranks have loaded their parts: form the group; memory that is free afterwards is for KV."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank waits for plans."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question whether all earlier plans have been executed; the answer repeats the question."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank cannot continue."""

    error: Exception
