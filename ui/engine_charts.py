"""The Engine view's pictures, as SVG."""

from collections.abc import Sequence

from neo_desktop.app.live.schema import BoundView, LaneSpanView, LaneView, PredictionView, TimelineView
from neo_desktop.app.words import number
from neo_desktop.ui.html import Markup, tag

WIDTH, LEFT = 1000, 110  # of the timeline
LANE = 26
CHART_WIDTH, CHART_HEIGHT = 300, 56
LANE_NAMES = {
    "to-host": "to host",
    "cpu": "CPU attends",
    "to-device": "to device",
    "swap": "KV moves",
    "host-swap": "KV moves, CPU",
    "store": "KV of prompts",
}


def timeline(view: TimelineView, device: str) -> Markup:
    """Draw one iteration: a line per lane, a box per stage, and below where device and CPU overlap."""
    total = max(view.total_ms, 1e-6)
    scale = (WIDTH - LEFT - 4) / total

    def box(lane: LaneView, row: int, span: LaneSpanView) -> Markup:
        name = device if lane.name == "device" else LANE_NAMES.get(lane.name, lane.name)
        batch = "" if span.sub_batch is None else f", sub-batch {span.sub_batch}"
        took = span.end_ms - span.start_ms
        title = f"{name}: {span.stage}, layer {span.layer}{batch}, {number(took)} ms"
        return tag(
            "rect",
            tag("title", title),
            class_=f"span sub{'none' if span.sub_batch is None else span.sub_batch}",
            x=round(LEFT + span.start_ms * scale, 2),
            y=LANE * row + 3,
            width=round(max(took * scale - 0.5, 0.75), 2),
            height=LANE - 7,
        )

    parts: list[Markup] = []
    for row, lane in enumerate(view.lanes):
        name = device if lane.name == "device" else LANE_NAMES.get(lane.name, lane.name)
        parts.append(tag("text", name, x=LEFT - 8, y=LANE * row + 16, text_anchor="end"))
        parts += [box(lane, row, span) for span in lane.spans]
    bottom = LANE * len(view.lanes)
    for start, end in overlaps(view.lanes):
        parts.append(
            tag("rect", class_="both", x=round(LEFT + start * scale, 2), y=bottom + 1, height=4,
                width=round(max((end - start) * scale, 0.5), 2))
        )  # fmt: skip
    for step in range(5):
        at = total * step / 4
        parts.append(tag("text", f"{number(at)} ms", x=round(LEFT + at * scale), y=bottom + 20,
                         text_anchor="start" if step == 0 else "end" if step == 4 else "middle"))  # fmt: skip
    label = f"One iteration of {number(view.total_ms)} ms on {len(view.lanes)} lanes"
    return tag(
        "svg", parts, viewBox=f"0 0 {WIDTH} {bottom + 26}", class_="timeline", role="img", aria_label=label
    )


def overlaps(lanes: Sequence[LaneView]) -> list[tuple[float, float]]:
    """Return the times in ms in which device and CPU attention are both at work."""
    spans = {lane.name: lane.spans for lane in lanes}
    return [
        (max(a.start_ms, b.start_ms), min(a.end_ms, b.end_ms))
        for a in spans.get("cpu", ())
        for b in spans.get("device", ())
        if max(a.start_ms, b.start_ms) < min(a.end_ms, b.end_ms)
    ]


def curves(series: dict[str, Sequence[float]], label: str) -> Markup:
    """Draw curves from left to right; the highest 3 % of the values may leave the picture."""
    everything = sorted(value for values in series.values() for value in values)
    most = max(1.15 * everything[int(0.97 * (len(everything) - 1))], 1e-6) if everything else 1.0
    lines = [
        tag(
            "polyline",
            class_=f"curve {name}",
            points=_points(values, most),
            vector_effect="non-scaling-stroke",
        )
        for name, values in series.items()
    ]
    return tag(
        "svg",
        lines,
        viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
        preserveAspectRatio="none",
        class_="chart",
        role="img",
        aria_label=label,
    )


def _points(values: Sequence[float], most: float) -> str:
    step = CHART_WIDTH / max(len(values) - 1, 1)
    height = CHART_HEIGHT - 6
    return " ".join(
        f"{step * index:.1f},{CHART_HEIGHT - 2 - height * min(value, most) / most:.1f}"
        for index, value in enumerate(values)
    )


def prediction(view: PredictionView) -> list[Markup]:
    """Draw predicted beside real times of iterations."""
    text = (
        f"Last iteration: predicted {number(view.predicted_ms[-1])} ms, took {number(view.real_ms[-1])} ms. "
        f"Off by {view.mean_error:.0%} on average over {len(view.real_ms)} iterations."
    )
    keys = tag("p", tag("span", "took", class_="key real"), tag("span", "predicted", class_="key predicted"))
    return [tag("p", text), curves({"real": view.real_ms, "predicted": view.predicted_ms}, text), keys]


def bound(view: BoundView, policy: str) -> list[Markup]:
    """Draw the real time beside the least possible one."""
    rows = [("It took", view.real_ms, "real"), ("Least possible", view.least_ms, "least")]
    text = f"{view.share:.0%} of the fastest that this computer could do with any schedule."
    if view.share > 1:
        text += " More than 100 %: the tables were measured while the computer was busier."
    if view.gpu_alone_ms is not None and policy != "gpu-only":
        rows.append(("Least, GPU memory alone", view.gpu_alone_ms, "gpu"))
        times = int(10 * view.gpu_alone_ms / view.real_ms) / 10  # rounded down: it is a claim
        if times > 1:
            text += f" With GPU memory alone the same work would have taken at least {times} times as long."
    return [tag("p", text), bars(rows, "ms")]


def bars(rows: Sequence[tuple[str, float, str]], unit: str = "") -> Markup:
    """Draw a labelled bar per row (name, value, kind)."""
    most = max([value for _, value, _ in rows] + [1e-9])
    parts = [
        (
            tag("dt", name),
            tag(
                "dd",
                tag("meter", min=0, max=1, value=round(value / most, 4), class_=kind),
                tag("span", f"{number(value)} {unit}".strip()),
            ),
        )
        for name, value, kind in rows
    ]
    return tag("dl", parts, class_="bars")
