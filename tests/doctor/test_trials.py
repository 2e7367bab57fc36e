"""A check that hangs, ends its process or is wrong is marked, and the next check runs."""

import sys
from pathlib import Path

import pytest

from neo_desktop.engine.doctor.outcome import Outcome, Result, limits_of, unserved
from neo_desktop.engine.doctor.trials import Subject, run_selfchecks

ORDER = ["needed", "well", "hang", "crash", "leave", "wrong", "right", "refused", "full", "replaced", "where"]
CHILD = (sys.executable, str(Path(__file__).with_name("failing_child.py")))


@pytest.fixture(scope="module")
def told() -> list[tuple[str, Outcome | None]]:
    return []


@pytest.fixture(scope="module")
def outcomes(told: list[tuple[str, Outcome | None]]) -> dict[str, Outcome]:
    found = run_selfchecks(
        Subject(), child=CHILD, listener=lambda title, outcome: told.append((title, outcome))
    )
    return {outcome.name: outcome for outcome in found}


def test_every_check_has_its_turn_in_order(outcomes: dict[str, Outcome]) -> None:
    assert list(outcomes) == ORDER


@pytest.mark.parametrize(
    ("name", "result", "reason"),
    [
        ("well", Result.OK, None),
        ("hang", Result.HUNG, "5 s"),
        ("crash", Result.CRASHED, "SIGSEGV"),
        ("leave", Result.CRASHED, "exit code 7"),
        ("wrong", Result.FAILED, "relative error is nan"),
        ("right", Result.OK, None),
        ("refused", Result.FAILED, "RuntimeError: cuThis failed in ~/secret"),
        ("full", Result.NO_MEMORY, "too little GPU memory"),
        ("replaced", Result.FAILED, "no compiler"),
    ],
)
def test_each_way_to_fail_is_told(
    outcomes: dict[str, Outcome], name: str, result: Result, reason: str | None
) -> None:
    outcome = outcomes[name]
    assert outcome.result is result
    assert (outcome.reason is None) == (reason is None)
    assert (reason or "") in (outcome.reason or "")
    assert "programmers" not in (outcome.reason or "")


def test_later_checks_do_without_what_failed(outcomes: dict[str, Outcome]) -> None:
    figures = outcomes["where"].figures
    assert figures["rope_append"] == "triton"  # its check ran out of memory, so nothing is known
    assert (figures["graphs"], figures["paged_decode"], figures["norm"]) == ("eager", "torch", "torch")


def test_limits_follow_from_outcomes(outcomes: dict[str, Outcome]) -> None:
    limits = {limit.mechanism: limit for limit in limits_of(list(outcomes.values()))}
    assert {name: limit.level for name, limit in limits.items()} == {
        "graphs": "eager",
        "paged_decode": "torch",
        "norm": "torch",
    }
    assert "5 s" in limits["graphs"].reason  # the timeout of the check that hung
    assert [outcome.name for outcome in unserved(list(outcomes.values()))] == ["leave", "refused"]


def test_a_subject_that_cannot_be_had_is_told() -> None:
    (outcome,) = run_selfchecks(Subject(model="nothing"), child=CHILD)
    assert outcome.result is Result.FAILED
    assert outcome.reason == "ValueError: there is no such model"


def test_a_child_that_cannot_start_ends_the_checks() -> None:
    (outcome,) = run_selfchecks(Subject(), child=(*CHILD, "dead"))
    assert outcome.result is Result.CRASHED
    assert "exit code 3" in str(outcome.reason)
