"""Finds the best division of offloaded matrices between bus and CPU: HeteGen's section 4.4."""

import time
from collections.abc import Callable

from neo_desktop.models.linear.shares import StreamedShares

ROWS_STEP = 4  # ratio of consecutive row counts
AROUND = (-0.15, 0.0, 0.15)  # offsets to try around the share of equal times;
CLEAR = 4.0  # if one side alone takes this many times longer, it gets nothing


Measure = Callable[[int, StreamedShares], float]
"""Returns the time of a layer's linear stages for a number of rows and these shares."""


def measured_shares(measure: Measure, max_rows: int, seconds: float) -> StreamedShares:
    """Return the best shares for 1, 4, 16 .. rows.

    The CPU alone and the bus alone are measured first. Their times give the share at which both take equal
    time; that share and its neighbours are measured next. The share only grows with the rows, because the
    CPU's matmuls become compute-bound.

    Args:
        measure: in ms.
        max_rows: of a matmul.
        seconds: approximate duration; unmeasured larger row counts stream everything.
    """
    end = time.perf_counter() + seconds
    sizes, shares, least = [], [], 0.0
    rows = 1
    while rows <= max_rows and least < 1.0:
        least = max(_best(measure, rows), least)
        sizes.append(rows)
        shares.append(least)
        rows *= ROWS_STEP
        if rows <= max_rows and least < 1.0 and time.perf_counter() > end:
            sizes.append(max_rows)
            shares.append(1.0)
            break
    return StreamedShares(tuple(sizes), tuple(shares))


def _best(measure: Measure, rows: int) -> float:
    def ms(share: float) -> float:
        return min(measure(rows, StreamedShares((1,), (share,))) for _ in range(2))

    on_cpu, on_bus = ms(0.0), ms(1.0)
    if on_cpu > CLEAR * on_bus:
        return 1.0
    crossing = on_cpu / (on_cpu + on_bus)
    tried = {0.0: on_cpu, 1.0: on_bus}
    for step in AROUND:
        share = min(max(crossing + step, 0.0), 1.0)
        if share not in tried:
            tried[share] = ms(share)
    return min(tried, key=lambda share: tried[share])
