"""The Engine view: where each chat's KV is, who was busy when, what was predicted and what it took."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from neo_desktop.app.live.schema import Cache, EngineState, EngineView, RequestLine, Running, TimelineView
from neo_desktop.app.page.services import PageServices
from neo_desktop.app.words import number
from neo_desktop.engine.stats import LLAMACPP
from neo_desktop.ui.engine_charts import bars, bound, curves, prediction, timeline
from neo_desktop.ui.following import follow_panel
from neo_desktop.ui.html import Markup, add_navigation, panel, tag

PERIOD_S = 1.0
HISTORY = 120  # seconds of rates
MAX_SHOWN = 64  # chats drawn one by one, per tier
ABOUT = {
    "Memory of chats": "A model keeps keys and values of every token so far (the KV cache). Here they are in "
    "two places: the GPU-cache, and the CPU-cache in main memory. Blocks of ended chats "
    "stay until their room is needed.",
    "Chats": "Each square is a request. Attention is computed where its KV is: only small vectors "
    "cross the bus.",
    "Tokens per second": "Tokens of all chats together, over the last three seconds.",
    "Last iteration": "An iteration brings each chat in the batch one token further, or computes a part of "
    "a prompt. With two sub-batches the CPU attends for one while the GPU computes for "
    "the other.",
    "Prediction": "The scheduler predicts each way to run an iteration, from tables measured on this "
    "computer, and takes the best.",
    "The limit": "The least time that this computer could need for the last iterations: weights read "
    "as seldom as memory allows, perfect overlap, no waiting.",
    "Model": "Counters since the model was loaded.",
}


def engine_view(services: PageServices) -> None:
    """Build the view; it asks the engine once a second while it is seen."""
    add_navigation()
    shown = panel("<p>Asking the engine …</p>", elem_id="engine")

    async def follow() -> AsyncIterator[str]:
        rates: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        while True:
            view = await services.engine.view()
            now = view.running.rates if view.running is not None else None
            rates.append((now.output_tokens_per_s, now.prompt_tokens_per_s) if now else (0.0, 0.0))
            yield engine_html(view, list(rates))
            await asyncio.sleep(PERIOD_S)

    follow_panel(shown, follow)


def engine_html(view: EngineView, rates: list[tuple[float, float]]) -> Markup:
    """Return the whole view."""
    notes = [*view.notes]
    if view.age_s >= 3:
        notes.append(f"The engine is busy with a long iteration; this is {view.age_s:.0f} s old.")
    head = [tag("h1", "Engine"), tag("p", view.sentence, class_="sentence")]
    if notes:
        head.append(tag("p", " ".join(notes), class_="muted"))
    running = view.running
    if running is None:
        return tag("div", head, class_="view", data_state=view.state)
    device = "imitated GPU" if running.is_gpu_imitated else "GPU"
    cards = [_memory(running), _chats(running, device)]
    if any(sum(rate) for rate in rates):
        cards.append(_rates(rates))
    is_idle = view.state is EngineState.IDLE
    if running.timeline is not None:
        cards.append(_iteration(running.timeline, device))
    elif not is_idle and running.backend != LLAMACPP:
        cards.append(_card("Last iteration", tag("p", "The next iteration is drawn here.")))
    if running.prediction is not None:
        cards.append(_card("Prediction", *prediction(running.prediction)))
    if running.bound is not None:
        cards.append(_card("The limit", *bound(running.bound, running.policy)))
    cards.append(_facts(running))
    return tag("div", head, tag("div", cards, class_="cards"), class_="view", data_state=view.state)


def _card(title: str, *children: object, kind: str = "") -> Markup:
    about = tag("details", tag("summary", "?", aria_label=f"What is this: {title}?"), tag("p", ABOUT[title]))
    return tag("section", tag("h2", title), about, *children, class_=f"card {kind}".strip())


def _memory(running: Running) -> Markup:
    imitated = ", imitated" if running.is_gpu_imitated else ""
    caches = [
        (f"GPU-cache{imitated}", "gpu", running.gpu_cache),
        ("CPU-cache", "cpu", running.cpu_cache),
    ]
    workers = []
    for worker in running.workers:
        state = worker.lost or f"{worker.used_tokens:,} of {worker.total_tokens:,} tokens"
        workers.append(tag("p", f"{worker.name} ({worker.address}): {state}"))
    gauges = [_gauge(name, tier, cache, running.requests) for name, tier, cache in caches if cache]
    return _card("Memory of chats", gauges, workers)


def _gauge(name: str, tier: str, cache: Cache, requests: list[RequestLine]) -> Markup:
    total, used, left = cache.total_tokens, cache.used_tokens, cache.leftover_tokens
    there = [request for request in requests if request.tier == tier]
    tokens = sum(request.tokens for request in there)
    scale = used / tokens if tokens > used else 1.0  # chats that share a beginning keep it once
    pieces = [(f"used {tier}", request.tokens * scale, describe(request)) for request in there]
    pieces += [
        (f"used {tier}", max(used - tokens, 0), "in use"),
        ("left", left, "of ended chats, reusable"),
        ("free", max(total - used - left, 0), "free"),
    ]
    spans = [
        tag("span", class_=kind, title=title, style=f"flex-grow:{size:.0f}")
        for kind, size, title in pieces
        if size
    ]
    bar = tag("div", spans, class_="bar")
    text = (
        f"{used:,} of {total:,} tokens" + (f" · {left:,} of ended chats" if left else "")
        if total
        else "switched off"
    )
    share = f"{used / total:.0%}" if total else ""
    return tag(
        "div",
        tag("p", tag("strong", name), tag("span", share)),
        bar,
        tag("p", text, class_="muted"),
        class_="gauge",
    )


def describe(request: RequestLine) -> str:
    """Return a request in words."""
    if request.progress == "prefilling":
        return f"Chat {request.number}: prompt, {request.computed_tokens:,} of {request.tokens:,} tokens"
    state = "waits for the CPU" if request.is_held else "writing"
    return f"Chat {request.number}: {request.tokens:,} tokens, {state}"


def _chats(running: Running, device: str) -> Markup:
    requests = running.requests
    if not requests and not running.waiting:
        return _card(
            "Chats",
            tag("p", "Ask something, on this page or through the API, and it shows here.", class_="muted"),
        )
    names = {
        "gpu": f"On the {device}",
        "cpu": "In main memory",
        "worker": "On workers",
    }
    rows: list[Markup] = []
    for tier, name in names.items():
        there = [request for request in requests if request.tier == tier]
        if there:
            dots = [
                tag("li", class_=f"dot {tier} {'held' if one.is_held else one.progress}", title=describe(one))
                for one in there[:MAX_SHOWN]
            ]
            rows += [tag("p", name, tag("strong", len(there))), tag("ul", dots, class_="dots")]
    if running.waiting:
        rows.append(tag("p", "Waiting", tag("strong", running.waiting)))
    alone = running.gpu_alone_requests
    if requests and alone is not None and running.policy != "gpu-only":
        rows.append(
            bars([("At once now", len(requests), "real"), ("GPU memory alone would hold", alone, "gpu")])
        )
    return _card("Chats", rows)


def _rates(rates: list[tuple[float, float]]) -> Markup:
    parts = []
    for index, name in enumerate(("written", "prompts read")):
        values = [rate[index] for rate in rates]
        label = f"{number(round(values[-1]))} {name}, at most {number(round(max(values)))}"
        parts += [tag("p", tag("strong", label)), curves({"real": values}, f"Tokens per second: {label}")]
    return _card("Tokens per second", parts)


def _iteration(view: TimelineView, device: str) -> Markup:
    busy = {lane.name: lane.busy for lane in view.lanes}
    parts = [f"{number(view.total_ms)} ms"]
    if "device" in busy:
        parts.append(f"the {device} was busy for {busy['device']:.0%}")
    if "cpu" in busy:
        parts.append(f"the CPU attended for {busy['cpu']:.0%}")
    if view.overlap is not None:
        parts.append(f"overlap {view.overlap:.0%}")
    text = ", ".join(parts) + "."
    if not view.is_device_recorded:
        text += " The GPU ran this iteration as one CUDA graph, whose parts are not recorded."
    return _card("Last iteration", tag("p", text), timeline(view, device), kind="wide")


def _facts(running: Running) -> Markup:
    counters = running.counters
    runs_on = running.device_name or ("CPU (GPU imitated)" if running.is_gpu_imitated else "CPU")
    rows = [("Model", running.model), ("Runs on", runs_on), ("Policy", running.policy)]
    if running.backend == LLAMACPP:
        rows[2] = ("Computed by", "llama.cpp")
    rows += [("Weights", f"{weights.bytes / 1e6:,.0f} MB, {weights.memory}") for weights in running.weights]
    rows += [("Computes in", running.dtype), ("Iterations", f"{counters.iterations:,}")]
    if running.backend != LLAMACPP:
        rows += [
            ("… with two sub-batches", _part(counters.double_iterations, counters.iterations)),
            ("Tokens written", f"{counters.output_tokens:,}"),
            ("… attention on the CPU", _part(counters.cpu_decodes, counters.output_tokens)),
            ("… asynchronously", _part(counters.async_decodes, counters.output_tokens)),
        ]
    rows += [
        ("Prompt tokens", f"{counters.prompt_tokens:,}"),
        ("… from the prefix cache", _part(counters.cached_tokens, counters.prompt_tokens)),
        ("Moved / preempted", f"{counters.moves:,} / {counters.preemptions:,}"),
    ]
    return _card(
        "Model", tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in rows], class_="facts")
    )


def _part(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.0%})" if whole else f"{part:,}"
