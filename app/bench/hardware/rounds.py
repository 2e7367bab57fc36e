"""Measurements that take turns, so that a disturbance hits a few repetitions of each and not all of one."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from neo_desktop.app.bench.section import Progress

LEAST_ROUNDS = 3


class Case(NamedTuple):
    """One measurement: what, and at which number of threads, bytes or rows."""

    what: str
    size: int
    dtype: str = ""


Samples = dict[Case, list[float]]


def rounds(
    cases: Mapping[Case, Callable[[], float]], seconds: float, progress: Progress
) -> Iterator[Samples]:
    """Make all measurements once without counting them, then in turn, again and again, for about so long.

    Yields what there is after each round: `case -> its samples so far`.
    """
    for case, measure in cases.items():
        progress(0.0, f"warming up: {case.what}")
        measure()
    samples: Samples = {case: [] for case in cases}
    start = time.perf_counter()
    round_seconds, done = 0.0, 0
    while done < LEAST_ROUNDS or round_seconds * (done + 1) < seconds:
        share = done * round_seconds / max(seconds, LEAST_ROUNDS * round_seconds)
        new = []
        for case, measure in cases.items():
            progress(share, case.what)
            new.append(measure())
        for values, value in zip(samples.values(), new, strict=True):
            values.append(value)
        done += 1
        round_seconds = (time.perf_counter() - start) / done
        yield samples
