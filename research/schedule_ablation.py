"""Simulate `auto` without one part of the scheduler at a time, on the machines and workloads of the sweep.

    python -m research.schedule_ablation --data FOLDER --requests 120

`sweep_simulation` describes FOLDER. Prints a table of docs/scheduling.md: output tokens/s without a part,
relative to those with it: minimum, maximum, and the number of cases that change by 2 % or more.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from neo_desktop.engine.schedule import (
    iteration_builder,
    partition,
    policies,
    scheduler,
    steady_state,
    workload_stats,
)
from neo_desktop.engine.schedule.partition import CandidateGenerator
from neo_desktop.engine.schedule.steady_state import Kind, SteadyStateFinder
from research.cases import header, row
from research.sweep_simulation import cases

NOTICED = 0.02
NEVER = 1 << 30
_others = SteadyStateFinder._others


def _not_of(*kinds: Kind) -> Callable[..., Iterator[steady_state.SteadyState]]:
    def others(*arguments: Any) -> Iterator[steady_state.SteadyState]:
        return (each for each in _others(*arguments) if each.kind not in kinds)

    return others


def _without_async(*arguments: Any) -> Iterator[steady_state.SteadyState]:
    return (each for each in _others(*arguments) if not each.num_async)


def _none(*_: object, **__: object) -> Iterator[Any]:
    return iter(())


# Replacements, by part.
PARTS: Mapping[str, list[tuple[Any, str, Any]]] = {
    "prompts in both sub-batches (`Kind.PROMPTS_IN_BOTH`)": [
        (CandidateGenerator, "with_prompts_in_both", _none),
        (SteadyStateFinder, "_others", _not_of(Kind.PROMPTS_IN_BOTH)),
    ],
    "async decodes (`with_async`)": [
        (CandidateGenerator, "with_async", _none),
        (SteadyStateFinder, "_others", _without_async),
    ],
    "`WORTH_FILLING` 1.03, now 1": [(steady_state, "WORTH_FILLING", 1.0)],
    "`TOLERANCE` 0.01, now 0": [(partition, "TOLERANCE", 0.0)],
    "`SURPLUS` 1.25, now 1": [(policies, "SURPLUS", 1.0)],
    "`FILLING_ITERATIONS` 32, now none": [(policies, "FILLING_ITERATIONS", NEVER)],
    "`MAX_READING_SHARE` 0.15, now no bound": [(policies, "MAX_READING_SHARE", float(NEVER))],
    "`SMALLEST_CHUNK_TOKENS` 64, now 1": [(policies, "SMALLEST_CHUNK_TOKENS", 1)],
    "`USED_SHARE` 0.95, now 1": [(workload_stats, "USED_SHARE", 1.0)],
    "`TIMEOUT` 128, now none": [(iteration_builder, "TIMEOUT", NEVER)],
    "`MOST_WAITS` 16, now none": [(scheduler, "MOST_WAITS", NEVER)],
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """Disable a part of the scheduler within the block."""
    patches = [patch.object(*each) for each in PARTS[part]]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--part", choices=PARTS, action="append", help="One of them alone, or several.")
    options = parser.parse_args()
    found = [case for _, case in cases(options.data, options.requests, (1.0,))]
    whole = [case.rate("auto") for case in found]
    header("without", "least", "most", "cases that change by 2 % or more")
    for part in options.part or PARTS:
        with without(part):
            shares = [case.rate("auto") / all_of_it for case, all_of_it in zip(found, whole, strict=True)]
        changed = sum(abs(share - 1) >= NOTICED for share in shares)
        row(part, f"{min(shares):.1%}", f"{max(shares):.1%}", f"{changed} of {len(found)}")


if __name__ == "__main__":
    main()
