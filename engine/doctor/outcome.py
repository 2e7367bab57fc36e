"""A check's result, and what follows from all of them for the ladder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from neo_desktop.engine.ladder import MECHANISMS

MODEL, ANSWERS, MEMORY = "model", "answers", "memory"  # names of checks, or their beginnings

Figure = float | int | str
Figures = Mapping[str, Figure]  # units are in the names: `error`, `bound`, `ms`, `used_bytes`


class CheckError(RuntimeError):
    """A check has failed; a clause says what it found. `figures` are what it had measured until then."""

    def __init__(self, what: str, figures: Figures | None = None) -> None:
        super().__init__(what)
        self.figures = figures or {}


class Result(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"  # wrong results, or an error
    HUNG = "hung"  # ended after its deadline
    CRASHED = "crashed"  # it ended its process
    NO_MEMORY = "no memory"  # the GPU's was taken: nothing was found out


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check's result."""

    name: str
    title: str
    mechanism: str | None  # of the ladder, with the rung that was tried; None: nothing serves in its place
    rung: str | None
    result: Result
    reason: str | None = None  # a clause for people; None: all is well
    figures: Figures = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether all is well."""
        return self.result is Result.OK

    @property
    def has_failed(self) -> bool:
        """Whether what was tried cannot be relied on."""
        return self.result not in (Result.OK, Result.NO_MEMORY)

    @property
    def needs_model(self) -> bool:
        """True if the check takes the memory of a model."""
        return self.name.partition("-")[0] in (MODEL, ANSWERS, MEMORY)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Make one of what `to_json` returned; raises KeyError, TypeError or ValueError."""
        return cls(**{**data, "result": Result(data["result"])})


@dataclass(frozen=True, slots=True)
class Limit:
    """What follows for a mechanism."""

    mechanism: str
    rung: str
    reason: str


def limits_of(outcomes: Sequence[Outcome]) -> list[Limit]:
    """Return the highest rung without a failed check of each mechanism whose highest rung has one.

    Where all rungs failed it is the lowest: the outcomes themselves tell that none works.
    """
    limits = []
    for name, mechanism in MECHANISMS.items():
        failed = {o.rung: o for o in reversed(outcomes) if o.mechanism == name and o.has_failed}
        rungs = [rung.name for rung in mechanism.rungs]
        if rungs[0] not in failed:
            continue
        good = next((rung for rung in rungs if rung not in failed), rungs[-1])
        limits.append(Limit(name, good, failed[rungs[0]].reason or "a check failed"))
    return limits


def unserved(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the failed checks in whose place nothing serves."""
    lost = []
    for outcome in outcomes:
        if not outcome.has_failed:
            continue
        if outcome.mechanism is None:
            lost.append(outcome)
            continue
        rungs = MECHANISMS[outcome.mechanism].rungs
        failed = {o.rung for o in outcomes if o.mechanism == outcome.mechanism and o.has_failed}
        if outcome.rung == rungs[-1].name and failed.issuperset(rung.name for rung in rungs):
            lost.append(outcome)
    return lost
