"""What rank 0 and the others tell each other, through pipes, beside what they compute together.

    rank 0                                  another rank: engine/follower.py
    ──────                                  ────────────────────────────────
    Beginning ──────────────── stdin ─────→ loads its part
    (has loaded its own) ←──── stdout ───── Loaded
    Join ─────────────────────────────────→ joins the group, as rank 0 does; looks what memory is free
    ←────────────────────────────────────── Fitting
    Agreed, the least of all ─────────────→ takes memory
    (measures speeds, alone)
    ←────────────────────────────────────── Ready
    ToldPlan, and so on ──────────────────→ executes them
    Question, after an error of its own ──→ (has executed all before)
    ←────────────────────────────────────── the same Question
    the end of stdin ─────────────────────→ ends

What goes wrong there is told as Failed, and ends the process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.rank import Rank


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a rank is told first."""

    options: EngineOptions
    rank: Rank
    folder: Path  # where the ranks find each other
    timeout_s: float  # with a sum
    sys_path: Sequence[str]
    log_level: int
    limits: Sequence[tuple[str, str, str]]  # of the fallbacks: mechanism, level, reason


@dataclass(frozen=True, slots=True)
class Loaded:
    """It has loaded its part."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Fitting:
    """How many blocks find room."""

    blocks: Mapping[KVTier, int]


@dataclass(frozen=True, slots=True)
class Agreed:
    """How many blocks all ranks have."""

    blocks: Mapping[KVTier, int]


@dataclass(frozen=True, slots=True)
class Join:
    """All have loaded: the group is made now, and what is free then is for KV."""


@dataclass(frozen=True, slots=True)
class Ready:
    """It waits for plans."""


@dataclass(frozen=True, slots=True)
class Question:
    """Whether all plans have been executed that came before."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It cannot go on."""

    error: Exception
