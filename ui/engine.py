"""The Engine view: where each chat's KV is, who was busy when, what was predicted and what it took."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

from markupsafe import Markup

from neo_desktop.app.application import PageServices
from neo_desktop.app.live import EngineState, EngineView, notes
from neo_desktop.app.words import number
from neo_desktop.engine.execute.timeline import busy_shares
from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.live import LiveRequest, LiveView, Phase
from neo_desktop.engine.stats import LLAMACPP
from neo_desktop.ui.engine_charts import bars, bound, curves, prediction, timeline, total_ms
from neo_desktop.ui.following import follow_panel
from neo_desktop.ui.html import panel, tag

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
    shown = panel("<p>Asking the engine …</p>", elem_id="engine")

    async def follow() -> AsyncIterator[str]:
        rates: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        while True:
            view = await services.engine.view()
            now = view.live.rates if view.live is not None else None
            rates.append((now.output_tokens_per_s, now.prompt_tokens_per_s) if now else (0.0, 0.0))
            yield engine_html(view, list(rates))
            await asyncio.sleep(PERIOD_S)

    follow_panel(shown, follow)


def engine_html(view: EngineView, rates: list[tuple[float, float]]) -> Markup:
    """Return the whole view; `rates` are (written, prompts read), the newest last."""
    live = view.live
    told = [] if live is None else notes(live)
    if view.age_s >= 3:
        told.append(f"The engine is busy with a long iteration; this is {view.age_s:.0f} s old.")
    head = [tag("h1", "Engine"), tag("p", view.sentence, class_="sentence")]
    if told:
        head.append(tag("p", " ".join(told), class_="muted"))
    if live is None:
        return tag("div", head, class_="view", data_state=view.state)
    device = "imitated GPU" if live.is_gpu_imitated else "GPU"
    cards = [_memory(live), _chats(live, device)]
    if any(sum(rate) for rate in rates):
        cards.append(_rates(rates))
    if live.spans:
        cards.append(_iteration(live, device))
    elif view.state is not EngineState.IDLE and live.stats.backend != LLAMACPP:
        cards.append(_card("Last iteration", tag("p", "The next iteration is drawn here.")))
    if live.mean_error is not None:
        cards.append(_card("Prediction", *prediction(live)))
    if (limit := live.limit) is not None:
        cards.append(_card("The limit", *bound(limit, live.stats.policy)))
    cards.append(_facts(live))
    return tag("div", head, tag("div", cards, class_="cards"), class_="view", data_state=view.state)


def _card(title: str, *children: object, kind: str = "") -> Markup:
    about = tag("details", tag("summary", "?", aria_label=f"What is this: {title}?"), tag("p", ABOUT[title]))
    return tag("section", tag("h2", title), about, *children, class_=f"card {kind}".strip())


def _memory(live: LiveView) -> Markup:
    imitated = ", imitated" if live.is_gpu_imitated else ""
    size = live.stats.block_size
    gauges, workers = [], []
    for tier, pool in live.stats.pools.items():
        if (worker := live.workers.get(tier)) is not None:
            used = f"{pool.num_used_blocks * size:,} of {pool.num_blocks * size:,} tokens"
            workers.append(tag("p", f"{tier.name} ({worker.address}): {worker.lost or used}"))
        elif tier.label in ("gpu", "cpu"):
            there = [request for request in live.requests if request.tier == tier]
            name = f"{tier.title}{'' if tier.in_host_memory else imitated}"
            gauges.append(_gauge(name, tier.label, pool, size, there))
    return _card("Memory of chats", gauges, workers)


def _gauge(name: str, kind: str, pool: PoolUsage, block_size: int, there: list[LiveRequest]) -> Markup:
    total, used = pool.num_blocks * block_size, pool.num_used_blocks * block_size
    left = pool.num_cached_blocks * block_size
    tokens = sum(request.num_tokens for request in there)
    scale = used / tokens if tokens > used else 1.0  # chats that share a beginning keep it once
    pieces = [(f"used {kind}", request.num_tokens * scale, describe(request)) for request in there]
    pieces += [
        (f"used {kind}", max(used - tokens, 0), "in use"),
        ("left", left, "of ended chats, reusable"),
        ("free", max(total - used - left, 0), "free"),
    ]
    bar = [
        tag("span", class_=which, title=title, style=f"flex-grow:{size:.0f}")
        for which, size, title in pieces
        if size
    ]
    ended = f" · {left:,} of ended chats" if left else ""
    text = f"{used:,} of {total:,} tokens{ended}" if total else "switched off"
    head = tag("p", tag("strong", name), tag("span", f"{used / total:.0%}" if total else ""))
    return tag("div", head, tag("div", bar, class_="bar"), tag("p", text, class_="muted"), class_="gauge")


def describe(request: LiveRequest) -> str:
    """Return a request in words."""
    chat, tokens = f"Chat {request.arrival}", f"{request.num_tokens:,} tokens"
    if request.phase is Phase.PREFILLING:
        return f"{chat}: prompt, {request.num_computed_tokens:,} of {tokens}"
    return f"{chat}: {tokens}, {'waits for the CPU' if request.is_held else 'writing'}"


def _chats(live: LiveView, device: str) -> Markup:
    requests, waiting = live.requests, live.stats.num_waiting
    if not requests and not waiting:
        hint = "Ask something, on this page or through the API, and it shows here."
        return _card("Chats", tag("p", hint, class_="muted"))
    rows: list[Markup] = []
    for kind, name in (("gpu", f"On the {device}"), ("cpu", "In main memory"), ("worker", "On workers")):
        there = [one for one in requests if kind == ("worker" if one.tier.is_remote else one.tier.label)]
        if there:
            dots = [
                tag("li", class_=f"dot {kind} {'held' if one.is_held else one.phase}", title=describe(one))
                for one in there[:MAX_SHOWN]
            ]
            rows += [tag("p", name, tag("strong", len(there))), tag("ul", dots, class_="dots")]
    if waiting:
        rows.append(tag("p", "Waiting", tag("strong", waiting)))
    alone = live.num_gpu_alone
    if requests and alone is not None and live.stats.policy != "gpu-only":
        rows.append(bars([("At once now", len(requests)), ("GPU memory alone would hold", alone)]))
    return _card("Chats", rows)


def _rates(rates: list[tuple[float, float]]) -> Markup:
    parts = []
    for index, name in enumerate(("written", "prompts read")):
        values = [rate[index] for rate in rates]
        label = f"{number(round(values[-1]))} {name}, at most {number(round(max(values)))}"
        parts += [tag("p", tag("strong", label)), curves({"real": values}, f"Tokens per second: {label}")]
    return _card("Tokens per second", parts)


def _iteration(live: LiveView, device: str) -> Markup:
    busy = busy_shares(live.spans)
    parts = [f"{number(total_ms(live.spans))} ms"]
    if "device" in busy:
        parts.append(f"the {device} was busy for {busy['device']:.0%}")
    if "cpu" in busy:
        parts.append(f"the CPU attended for {busy['cpu']:.0%}")
    if live.overlap is not None:
        parts.append(f"overlap {live.overlap:.0%}")
    text = ", ".join(parts) + "."
    if "device" not in busy:
        text += " The GPU ran this iteration as one CUDA graph, whose parts are not recorded."
    return _card("Last iteration", tag("p", text), timeline(live.spans, device), kind="wide")


def _facts(live: LiveView) -> Markup:
    pairs = [(tag("dt", name), tag("dd", value)) for name, value in _counters(live)]
    return _card("Model", tag("dl", pairs, class_="facts"))


def _counters(live: LiveView) -> Iterator[tuple[str, str]]:
    stats = live.stats
    yield "Model", stats.model
    yield "Runs on", live.device_name or ("CPU (GPU imitated)" if live.is_gpu_imitated else "CPU")
    is_llamacpp = stats.backend == LLAMACPP
    yield ("Computed by", "llama.cpp") if is_llamacpp else ("Policy", stats.policy)
    yield "Weights", f"{live.weights_bytes / 1e6:,.0f} MB, {'host' if live.device_name is None else 'gpu'}"
    yield "Computes in", stats.dtype
    yield "Iterations", f"{stats.num_iterations:,}"
    if not is_llamacpp:
        yield "… with two sub-batches", _part(stats.num_double_iterations, stats.num_iterations)
        yield "Tokens written", f"{stats.num_output_tokens:,}"
        yield "… attention on the CPU", _part(stats.num_cpu_decodes, stats.num_output_tokens)
        yield "… asynchronously", _part(stats.num_async_decodes, stats.num_output_tokens)
    if (speculative := stats.speculative) is not None and speculative.num_drafts:
        yield "… drafted", _part(speculative.num_accepted_tokens, stats.num_output_tokens)
        yield "Drafts", f"{speculative.mean_width:.1f} tokens, {speculative.gain:.2f} times as fast"
    yield "Prompt tokens", f"{stats.num_prompt_tokens:,}"
    yield "… from the prefix cache", _part(stats.num_cached_tokens, stats.num_prompt_tokens)
    yield "Moved / preempted", f"{stats.num_moves:,} / {stats.num_preemptions:,}"


def _part(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.0%})" if whole else f"{part:,}"
