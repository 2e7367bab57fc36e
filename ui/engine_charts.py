"""The Engine view's pictures, as SVG."""

from collections.abc import Sequence

from markupsafe import Markup

from neo_desktop.app.words import number
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Span
from neo_desktop.engine.live import LeastTime, LiveView
from neo_desktop.ui.html import tag

WIDTH, LEFT = 1000, 110  # of the timeline
LANE = 26
CHART_WIDTH, CHART_HEIGHT = 300, 56
LANE_NAMES = {  # in the order of drawing; other lanes follow
    "device": "",
    "to-host": "to host",
    "cpu": "CPU attends",
    "to-device": "to device",
    "swap": "KV moves",
    "host-swap": "KV moves, CPU",
    "store": "KV of prompts",
    "experts": "experts move",
}


def total_ms(spans: Sequence[Span]) -> float:
    """Return the time from the first start to the last end."""
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e6


def timeline(spans: Sequence[Span], device: str) -> Markup:
    """Draw one iteration: a line per lane, a box per stage, and below where device and CPU overlap."""
    names = LANE_NAMES | {"device": device}
    found = dict.fromkeys(span.lane for span in spans)
    lanes = [*(lane for lane in names if lane in found), *(lane for lane in found if lane not in names)]
    begin_ns, total = min(span.start_ns for span in spans), max(total_ms(spans), 1e-6)
    scale = (WIDTH - LEFT - 4) / total

    def x(at_ns: int) -> float:
        return round(LEFT + (at_ns - begin_ns) / 1e6 * scale, 2)

    def box(span: Span) -> Markup:
        batch, took = span.stage.sub_batch, (span.end_ns - span.start_ns) / 1e6
        where = "" if batch == NO_SUB_BATCH else f", sub-batch {batch}"
        name = names.get(span.lane, span.lane)
        title = f"{name}: {span.stage.name}, layer {span.stage.layer}{where}, {number(took)} ms"
        kind = f"span sub{'none' if batch == NO_SUB_BATCH else batch}"
        width, y = round(max(took * scale - 0.5, 0.75), 2), LANE * lanes.index(span.lane) + 3
        return tag(
            "rect", tag("title", title), class_=kind, x=x(span.start_ns), y=y, width=width, height=LANE - 7
        )

    parts = [box(span) for span in spans]
    for row, lane in enumerate(lanes):
        parts.append(tag("text", names.get(lane, lane), x=LEFT - 8, y=LANE * row + 16, text_anchor="end"))
    bottom = LANE * len(lanes)
    for start, end in overlaps(spans):
        width = round(max((end - start) / 1e6 * scale, 0.5), 2)
        parts.append(tag("rect", class_="both", x=x(start), y=bottom + 1, height=4, width=width))
    for step, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        at = total * step / 4
        text = f"{number(at)} ms"
        parts.append(tag("text", text, x=round(LEFT + at * scale), y=bottom + 20, text_anchor=anchor))
    label = f"One iteration of {number(total)} ms on {len(lanes)} lanes"
    box_of_view = f"0 0 {WIDTH} {bottom + 26}"
    return tag("svg", parts, viewBox=box_of_view, class_="timeline", role="img", aria_label=label)


def overlaps(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the times in ns in which both device and CPU attention compute."""
    cpu, device = ([span for span in spans if span.lane == lane] for lane in ("cpu", "device"))
    both = ((max(a.start_ns, b.start_ns), min(a.end_ns, b.end_ns)) for a in cpu for b in device)
    return [(start, end) for start, end in both if start < end]


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
    box, look = f"0 0 {CHART_WIDTH} {CHART_HEIGHT}", {"class_": "chart", "role": "img"}
    return tag("svg", lines, viewBox=box, preserveAspectRatio="none", aria_label=label, **look)


def _points(values: Sequence[float], most: float) -> str:
    step = CHART_WIDTH / max(len(values) - 1, 1)
    height = CHART_HEIGHT - 6
    return " ".join(
        f"{step * index:.1f},{CHART_HEIGHT - 2 - height * min(value, most) / most:.1f}"
        for index, value in enumerate(values)
    )


def prediction(live: LiveView) -> list[Markup]:
    """Draw predicted beside real times of iterations."""
    pairs = [(one.predicted_ms, one.total_ms) for one in live.iterations if one.predicted_ms > 0]
    predicted, real = zip(*pairs, strict=True)
    text = (
        f"Last iteration: predicted {number(predicted[-1])} ms, took {number(real[-1])} ms. "
        f"Off by {live.mean_error:.0%} on average over {len(real)} iterations."
    )
    keys = tag("p", tag("span", "took", class_="key real"), tag("span", "predicted", class_="key predicted"))
    return [tag("p", text), curves({"real": real, "predicted": predicted}, text), keys]


def bound(limit: LeastTime, policy: str) -> list[Markup]:
    """Draw the real time beside the least possible one."""
    rows = [("It took", limit.real_ms), ("Least possible", limit.least_ms)]
    text = f"{limit.share:.0%} of the fastest that this computer could do with any schedule."
    if limit.share > 1:
        text += " More than 100 %: the tables were measured while the computer was busier."
    if limit.gpu_alone_ms is not None and policy != "gpu-only":
        rows.append(("Least, GPU memory alone", limit.gpu_alone_ms))
        times = int(10 * limit.gpu_alone_ms / limit.real_ms) / 10  # rounded down: it is a claim
        if times > 1:
            text += f" With GPU memory alone the same work would have taken at least {times} times as long."
    return [tag("p", text), bars(rows, "ms")]


def bars(rows: Sequence[tuple[str, float]], unit: str = "") -> Markup:
    """Draw a labelled bar per row (name, value)."""
    most = max([value for _, value in rows] + [1e-9])
    parts = []
    for name, value in rows:
        meter = tag("meter", min=0, max=1, value=round(value / most, 4))
        text = tag("span", f"{number(value)} {unit}".strip())
        parts += [tag("dt", name), tag("dd", meter, text)]
    return tag("dl", parts, class_="bars")
