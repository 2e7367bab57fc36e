"""Results of checks, and the resulting limits on fallbacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from neo_desktop.engine.fallbacks import MECHANISMS

MODEL, ANSWERS, MEMORY = "model", "answers", "memory"  # names of checks, or their prefixes

Figure = float | int | str
Figures = Mapping[str, Figure]  # units are in the names: `error`, `bound`, `ms`, `used_bytes`


class CheckError(RuntimeError):
    """A check failed; the message is a clause with the finding. `figures` were measured before."""

    def __init__(self, what: str, figures: Figures | None = None) -> None:
        super().__init__(what)
        self.figures = figures or {}


class Result(StrEnum):
    """Result of a check."""

    OK = "ok"
    FAILED = "failed"  # wrong results, or an error
    HUNG = "hung"  # missed its deadline
    CRASHED = "crashed"  # the process died
    NO_MEMORY = "no memory"  # too little GPU memory; the check is inconclusive


@dataclass(frozen=True, slots=True)
class Announcement:
    """A check that is about to run."""

    name: str  # unique
    title: str
    mechanism: str | None  # of the fallbacks; None: no fallback exists
    level: str | None
    deadline_s: float

    def outcome(self, result: Result, reason: str | None, figures: Figures) -> "Outcome":
        return Outcome(self.name, self.title, self.mechanism, self.level, result, reason, figures)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check's result."""

    name: str
    title: str
    mechanism: str | None  # of the fallbacks; None: no fallback exists
    level: str | None  # the level checked
    result: Result
    reason: str | None = None  # a clause for users; None: success
    figures: Figures = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.result is Result.OK

    @property
    def has_failed(self) -> bool:
        """True if the checked level is unreliable."""
        return self.result not in (Result.OK, Result.NO_MEMORY)

    @property
    def needs_model(self) -> bool:
        """True if the check takes the memory of a model."""
        return self.name.partition("-")[0] in (MODEL, ANSWERS, MEMORY)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Make an outcome from the result of `asdict`; raises KeyError, TypeError or ValueError."""
        return cls(**{**data, "result": Result(data["result"])})


@dataclass(frozen=True, slots=True)
class Limit:
    """Highest usable level of a mechanism."""

    mechanism: str
    level: str
    reason: str


def limits_of(outcomes: Sequence[Outcome]) -> list[Limit]:
    """Return, for each mechanism whose highest level failed, the highest level without a failed check.

    If all levels failed, it is the lowest; the outcomes themselves show that none works.
    """
    limits = []
    for name, mechanism in MECHANISMS.items():
        failed = _failed(outcomes, name)
        levels = [level.name for level in mechanism.levels]
        if levels[0] not in failed:
            continue
        good = next((level for level in levels if level not in failed), levels[-1])
        limits.append(Limit(name, good, failed[levels[0]].reason or "a check failed"))
    return limits


def unserved(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the failed checks without a fallback; of a mechanism that fails at every level, the lowest."""

    def is_lost(outcome: Outcome) -> bool:
        if outcome.mechanism is None:
            return True
        levels = [level.name for level in MECHANISMS[outcome.mechanism].levels]
        return outcome.level == levels[-1] and _failed(outcomes, outcome.mechanism).keys() >= set(levels)

    return [outcome for outcome in outcomes if outcome.has_failed and is_lost(outcome)]


def _failed(outcomes: Sequence[Outcome], mechanism: str) -> dict[str | None, Outcome]:
    """Return `level -> its first failed check`."""
    return {o.level: o for o in reversed(outcomes) if o.mechanism == mechanism and o.has_failed}
