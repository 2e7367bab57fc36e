"""Finds how split matrices are best divided between bus and CPU: HeteGen's alpha benchmark (section 4.4)."""

import time
from typing import Protocol

from neo_desktop.models.linear.shares import StreamedShares

ROWS_STEP = 4  # between the numbers of rows that are measured
AROUND = (-0.15, 0.0, 0.15)  # what is tried around the share at which bus and CPU should take the same time
CLEAR = 4.0  # times as long: then the slower one of the two gets nothing


class Timer(Protocol):
    """What measures."""

    def split_linear_ms(self, tokens: int, shares: StreamedShares, /) -> float:
        """Return what a layer's linear stages take, divided like this."""


def measured_shares(timer: Timer, max_rows: int, seconds: float) -> StreamedShares:
    """Return the shares that take least for 1, 4, 16 .. rows.

    The CPU alone and the bus alone are measured; where both take their part of these times, they take the
    same: there, and around there. For more rows the share only grows: the CPU's products become arithmetic.

    Args:
        max_rows: of a product.
        seconds: about how long it may take; for more rows than were measured until then all is streamed.
    """
    end = time.perf_counter() + seconds
    sizes, shares, least = [], [], 0.0
    rows = 1
    while rows <= max_rows and least < 1.0:
        least = max(_best(timer, rows), least)
        sizes.append(rows)
        shares.append(least)
        rows *= ROWS_STEP
        if rows <= max_rows and least < 1.0 and time.perf_counter() > end:
            sizes.append(max_rows)
            shares.append(1.0)
            break
    return StreamedShares(tuple(sizes), tuple(shares))


def _best(timer: Timer, rows: int) -> float:
    def ms(share: float) -> float:
        return min(timer.split_linear_ms(rows, StreamedShares((1,), (share,))) for _ in range(2))

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
