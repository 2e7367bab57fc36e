"""The page's pictures: SVG without size, in the page's colours (page/style.css)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from neo_desktop.app.words import number

COLOURS = ("blue", "orange", "green", "red")
WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 52  # margins of axes
ROW, NAMES = 20, 130  # of bars: the height of a row, the width of its name
TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, or dots of its own."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


class _Axis:
    """Places of values between two ends; `log`: each doubling is as long."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool) -> None:
        self._log = log
        self._least = min(values) if log else 0.0
        self._most = max(*values, self._least * 1.01, 1e-9)
        self._ends = low, high

    def __call__(self, value: float) -> float:
        least, most, at = (
            (math.log(each) if self._log else each) for each in (self._least, self._most, value)
        )
        low, high = self._ends
        return round(low + (at - least) / (most - least) * (high - low), 1)

    def ticks(self) -> list[float]:
        """Return round numbers."""
        if self._log:
            decades = range(math.floor(math.log10(self._least)), math.ceil(math.log10(self._most)) + 1)
            found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
            found = [each for each in found if self._least <= each <= self._most]
            return found[:: math.ceil(len(found) / TICKS)]
        raw = self._most / TICKS
        scale = 10.0 ** math.floor(math.log10(raw))
        step = next(each * scale for each in (1, 2, 5, 10) if each * scale >= raw)
        return [step * index for index in range(int(self._most / step) + 1)]


def lines(
    curves: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_names: Callable[[float], str] | None = None,
    limit: float | None = None,
) -> str:
    """Draw curves over x.

    Args:
        x_names: labels each x with a name of its own; None: round numbers.
        limit: a dotted line across.
    """
    points = [point for curve in curves for point in curve.points]
    height = HEIGHT + 16 * ((len(curves) + 1) // 2)
    x = _Axis([each for each, _ in points], LEFT, WIDTH - RIGHT, log_x)
    y = _Axis([each for _, each in points] + ([] if limit is None else [limit]), HEIGHT - BOTTOM, TOP, log_y)
    parts = []
    for at in y.ticks():
        parts.append(f'<path d="M{LEFT} {y(at)}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
        parts.append(_text(LEFT - 5, y(at) + 4, number(at), "end"))
    shown = sorted({each for each, _ in points}) if x_names else x.ticks()
    for at in shown:
        parts.append(_text(x(at), HEIGHT - BOTTOM + 15, x_names(at) if x_names else f"{at:g}", "middle"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - BOTTOM + 31, x_label, "middle"))
    parts.append(f'<g transform="rotate(-90)">{_text(-(HEIGHT - BOTTOM) / 2, 11, y_label, "middle")}</g>')
    if limit is not None:
        dots = 'stroke="var(--text)" stroke-dasharray="2 3"'
        parts.append(f'<path d="M{LEFT} {y(limit)}H{WIDTH - RIGHT}" {dots}/>')
    for index, curve in enumerate(curves):
        stroke = f'stroke="var(--{curve.colour})" stroke-width="1.5" fill="none"'
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        places = " ".join(f"{x(a)},{y(b)}" for a, b in curve.points)
        parts.append(f'<polyline points="{places}" {stroke}{dash}/>')
        parts += [f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" {stroke}/>' for a, b in curve.points]
        left, top = LEFT + index % 2 * 160, HEIGHT + 16 * (index // 2)
        parts.append(f'<path d="M{left} {top - 4}h22" {stroke}{dash}/>')
        parts.append(_text(left + 27, top, curve.name))
    return _svg(parts, height + 4)


def bars(rows: Iterable[tuple[str, float, str]], marks: Sequence[float | None] = ()) -> str:
    """Draw a bar for each row (name, value, label); `marks`: the value of a line across each bar, if any."""
    rows = list(rows)
    most = max([value for _, value, _ in rows] + [each or 0.0 for each in marks] + [1e-9])
    scale = (WIDTH - NAMES - 90) / most  # beside the longest bar, there is room for its label
    parts = []
    for index, (name, value, label) in enumerate(rows):
        top, width = ROW * index, round(scale * value, 1)
        parts.append(_text(NAMES - 6, top + 14, name, "end"))
        parts.append(f'<rect x="{NAMES}" y="{top + 3}" width="{width}" height="14" fill="var(--blue)"/>')
        mark = marks[index] if marks else None
        if mark is not None:
            at = NAMES + round(scale * mark, 1)
            parts.append(f'<path d="M{at} {top + 1}v18" stroke="var(--text)" stroke-width="2"/>')
        parts.append(_text(NAMES + round(scale * max(value, mark or 0.0), 1) + 6, top + 14, label))
    return _svg(parts, ROW * len(rows) + 4)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Iterable[str], height: int) -> str:
    return f'<svg role="img" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'
