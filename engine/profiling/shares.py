"""Finds the best division of offloaded matrices between bus and CPU: HeteGen's section 4.4."""

import time
from collections.abc import Callable

from neo_desktop.models.linear.shares import StreamedShares

ROWS_STEP = 4  # between the numbers of rows that are measured
AROUND = (-0.15, 0.0, 0.15)  # what is tried around the share at which bus and CPU should take the same time
CLEAR = 4.0  # times as long: then the slower one of the two gets nothing


Measure = Callable[[int, StreamedShares], float]
"""Returns what a layer's linear stages take for so many rows, divided like this."""


def measured_shares(measure: Measure, max_rows: int, seconds: float) -> StreamedShares:
    """Return the shares that take least for 1, 4, 16 .. rows.

    The CPU alone and the bus alone are measured; where both take their part of these times, they take the
    same: there, and around there. For more rows the share only grows: the CPU's products become arithmetic.

    Args:
        measure: in ms.
        max_rows: of a product.
        seconds: about how long it may take; for more rows than were measured until then all is streamed.
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
