"""The page's pictures: SVG without size, in the page's colours (page/style.css)."""

import math
from collections.abc import Iterable, Sequence
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


def lines(
    curves: Sequence[Line],
    x_label: str,
    y_label: str,
    x_names: Sequence[str] = (),
    limit: float | None = None,
) -> str:
    """Draw curves over x.

    Args:
        x_names: labels of x = 0, 1, 2, ...; empty: round numbers.
        limit: a dotted line across.
    """
    points = [point for curve in curves for point in curve.points]
    most_x = max(*(x for x, _ in points), 1e-9)
    most_y = max(*(y for _, y in points), limit or 0.0, 1e-9)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at_x(value: float) -> float:
        return round(LEFT + value / most_x * (right - LEFT), 1)

    def at_y(value: float) -> float:
        return round(bottom - value / most_y * (bottom - TOP), 1)

    parts = []
    for value in _ticks(most_y):
        parts.append(f'<path d="M{LEFT} {at_y(value)}H{right}" stroke="var(--line)"/>')
        parts.append(_text(LEFT - 5, at_y(value) + 4, number(value), "end"))
    names: dict[float, str] = {float(place): name for place, name in enumerate(x_names)}
    names = names or {value: f"{value:g}" for value in _ticks(most_x)}
    parts += [_text(at_x(value), bottom + 15, name, "middle") for value, name in names.items()]
    parts.append(_text((LEFT + WIDTH) / 2, bottom + 31, x_label, "middle"))
    parts.append(f'<g transform="rotate(-90)">{_text(-bottom / 2, 11, y_label, "middle")}</g>')
    if limit is not None:
        dots = 'stroke="var(--text)" stroke-dasharray="2 3"'
        parts.append(f'<path d="M{LEFT} {at_y(limit)}H{right}" {dots}/>')
    for index, curve in enumerate(curves):
        stroke = f'stroke="var(--{curve.colour})" stroke-width="1.5" fill="none"'
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        places = [(at_x(x), at_y(y)) for x, y in curve.points]
        parts.append(f'<polyline points="{" ".join(f"{x},{y}" for x, y in places)}" {stroke}{dash}/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" {stroke}/>' for x, y in places]
        left, top = LEFT + index % 2 * 160, HEIGHT + 16 * (index // 2)
        parts.append(f'<path d="M{left} {top - 4}h22" {stroke}{dash}/>')
        parts.append(_text(left + 27, top, curve.name))
    return _svg(parts, HEIGHT + 16 * ((len(curves) + 1) // 2) + 4)


def bars(rows: Sequence[tuple[str, float, str]], marks: Sequence[float]) -> str:
    """Draw a bar for each row (name, value, label), and a line across it at the value of its mark."""
    most = max(*(value for _, value, _ in rows), *marks, 1e-9)
    scale = (WIDTH - NAMES - 90) / most  # beside the longest bar, there is room for its label
    parts = []
    for index, ((name, value, label), mark) in enumerate(zip(rows, marks, strict=True)):
        top, width, at = ROW * index, round(scale * value, 1), NAMES + round(scale * mark, 1)
        parts.append(_text(NAMES - 6, top + 14, name, "end"))
        parts.append(f'<rect x="{NAMES}" y="{top + 3}" width="{width}" height="14" fill="var(--blue)"/>')
        parts.append(f'<path d="M{at} {top + 1}v18" stroke="var(--text)" stroke-width="2"/>')
        parts.append(_text(max(NAMES + width, at) + 6, top + 14, label))
    return _svg(parts, ROW * len(rows) + 4)


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 on."""
    scale = 10.0 ** math.floor(math.log10(most / TICKS))
    step = next(each * scale for each in (1, 2, 5, 10) if each * scale >= most / TICKS)
    return [step * index for index in range(int(most / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Iterable[str], height: int) -> str:
    return f'<svg role="img" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'
