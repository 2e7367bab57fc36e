"""The Models view: the models on this computer, their fit and predicted speed; load, unload, download."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from neo_desktop.app.news import MODELS
from neo_desktop.app.page.services import PageServices
from neo_desktop.app.words import large_count, number, size
from neo_desktop.ui.following import QUIET, follow_panel
from neo_desktop.ui.html import Markup, add_navigation, button, panel, tag
from neo_desktop.ui.refusals import telling


def models_view(services: PageServices) -> None:
    """Build the view."""
    shelf = services.shelf
    add_navigation()
    shown = panel("<p>Looking for models …</p>", elem_id="models")
    with gr.Column(elem_classes="side-by-side"), gr.Group(elem_id="pull"):
        name = gr.Textbox(
            label="Get another model",
            info="Its name on huggingface.co, as ORGANISATION/NAME; of GGUF files, :QUANTISATION may follow. "
            "No code is downloaded.",
            placeholder="Qwen/Qwen3-0.6B",
            max_lines=1,
        )
        start = gr.Button("Download", variant="primary")

    async def follow() -> AsyncIterator[str]:
        with services.news.follow(MODELS) as changed:
            await shelf.fresh_view()
            while True:
                changed.clear()
                yield models_html(shelf.view())
                await changed.wait()

    async def act(event: gr.EventData) -> None:
        asked: dict[str, str] = event._data
        with telling():
            match asked["act"]:
                case "load":
                    await shelf.load(asked["name"])
                case "unload":
                    await shelf.unload()
                case "get":
                    shelf.start_pull(asked["name"], load=True)
                case "stop":
                    await shelf.stop_pull()

    async def pull(model: str) -> str:
        with telling():
            shelf.start_pull(model.strip())
        return ""

    follow_panel(shown, follow)
    shown.act(act, None, None, **QUIET)
    gr.on([name.submit, start.click], pull, [name], [name], **QUIET)


def models_html(view: dict[str, Any]) -> Markup:
    """Return the whole view of a ModelsView."""
    parts = [
        tag("h1", "Models"),
        tag("p", "One model is loaded at a time. ", _note(view["models"]), class_="muted"),
    ]
    loading = view["loading"]
    if loading is not None:
        why = tag("p", loading["reason"]) if loading["reason"] else None
        stop = button("Stop", "unload")
        parts.append(_progress(f"Loading {loading['name']}", loading["share"], loading["what"], stop, why))
    elif view["error"]:
        parts.append(tag("p", view["error"], " Choose another model.", class_="error", role="alert"))
    if (pulling := view["pulling"]) is not None:
        stop = button("Stop", "stop")
        parts.append(_progress(f"Downloading {pulling['name']}", pulling["share"], pulling["what"], stop))
    if view["pull_error"]:
        parts.append(tag("p", view["pull_error"], class_="error", role="alert"))
    if view["offer"] is not None and view["pulling"] is None:
        parts.append(offer_html(view["offer"]))
    models = sorted(view["models"], key=lambda one: _rank(one, view))
    parts.append(tag("ul", [_card(model, view) for model in models], class_="cards"))
    if view["folders"]:
        parts.append(tag("p", f"Looked for in {', '.join(view['folders'])}.", class_="muted"))
    return tag("div", parts, class_="view")


def offer_html(offer: dict[str, Any]) -> Markup:
    """Return the offer of a first real model."""
    facts = f"{size(offer['size_bytes'])} to download, licence {offer['licence']}."
    get = button(f"Get {offer['title']}", "get", kind="primary", name=offer["name"])
    return tag("section", tag("p", "Only the small built-in guide is here. A real model answers more."), get,
               tag("p", facts, class_="muted"), class_="card offer")  # fmt: skip


def _rank(model: dict[str, Any], view: dict[str, Any]) -> int:
    if view["loaded"] and model["name"] == view["loaded"]["name"]:
        return 0
    return 1 if can_load(model) else 2 if model["runnable"] else 3


def can_load(model: dict[str, Any]) -> bool:
    """Return whether a model runs here and fits."""
    return bool(model["runnable"]) and not (model["fit"] and model["fit"]["reason"])


def _progress(title: str, share: float, what: str, *others: object) -> Markup:
    bar = tag("progress", max=1, value=round(share, 3), aria_label=title)
    parts = [tag("strong", title), bar, tag("span", f"{share:.0%}, {what}"), others]
    return tag("section", parts, class_="card", role="status")


def _card(model: dict[str, Any], view: dict[str, Any]) -> Markup:
    loaded = view["loaded"]
    is_loaded = loaded is not None and model["name"] == loaded["name"]
    fit = model["fit"]
    reason = model["reason"] or (fit and fit["reason"])
    state = "Resting" if is_loaded and loaded["is_resting"] else "Loaded"
    badge = tag("span", state, class_="badge") if is_loaded else None
    parts = [tag("h2", model["name"], badge), tag("p", " · ".join(_facts(model)), class_="muted")]
    if reason:
        verdict = "Does not fit" if model["runnable"] else "Cannot be run"
        parts.append(tag("p", f"{verdict}: {reason}", class_="reason"))
    if can_load(model):
        if fit:
            figures = [(tag("dt", name), tag("dd", value)) for name, value in _figures(fit)]
            parts += [_chats(fit), tag("dl", figures, class_="facts")]
        if is_loaded and not loaded["is_resting"]:
            parts.append(button("Unload", "unload", title=f"Unload {model['name']}"))
        elif view["loading"] is None:
            parts.append(button("Load", "load", title=f"Load {model['name']}", name=model["name"]))
    return tag("li", parts, class_="card" if can_load(model) else "card unusable", data_model=model["name"])


def _facts(model: dict[str, Any]) -> list[str]:
    facts = []
    if model["size_bytes"]:
        facts.append(size(model["size_bytes"]))
    if model["dtype"]:
        facts.append(model["dtype"])
    if model["parameters"]:
        facts.append(f"{large_count(model['parameters'])} parameters")
    if model["runnable"] and model["backend"] == "llamacpp":
        facts.append("computed by llama.cpp")
    if model["runnable"] and model["is_by_transformers"]:
        facts.append("by the code of transformers")
    if model["context_tokens"]:
        facts.append(f"context {model['context_tokens']:,}")
    return facts


def _chats(fit: dict[str, Any]) -> Markup:
    def most(count: int) -> str:
        return f"{count:,} or more" if count >= fit["most_chats"] else f"{count:,}"

    place = "in the imitated GPU-cache" if fit["is_imitated"] else "on the GPU alone"
    chats = "chat" if fit["gpu_chats"] == 1 else "chats"
    text = f"{most(fit['gpu_chats'])} {chats} of {fit['chat_tokens']:,} tokens"
    if fit["chats"] > fit["gpu_chats"]:
        text += f" {place}, {most(fit['chats'])} with main memory"
    pieces = [("used gpu", fit["gpu_chats"]), ("used cpu", fit["chats"] - fit["gpu_chats"])]
    bar = [tag("span", class_=kind, style=f"flex-grow:{count}") for kind, count in pieces if count > 0]
    return tag("div", tag("p", text), tag("div", bar, class_="bar"))


def _figures(fit: dict[str, Any]) -> list[tuple[str, str]]:
    elsewhere = f", {size(fit['host_weights_bytes'])} in main memory" if fit["host_weights_bytes"] else ""
    rows = [
        ("Weights", f"{size(fit['weights_bytes'])}, {fit['weights_become']}{elsewhere}"),
        ("KV cache", f"{size(fit['kv_bytes_per_1000_tokens'])} per 1,000 tokens"),
    ]
    speed = fit["speed"]
    if speed is None:
        return [*rows, ("Speed", f"not known: {fit['speed_reason']}")]
    rows.append(("One chat", f"about {number(speed['one_chat_tokens_per_s'])} tokens/s (predicted)"))
    if speed["best_chats"] > 1:
        together = f"about {number(speed['best_tokens_per_s'])} tokens/s together"
        rows.append((f"{speed['best_chats']} chats", together))
    return rows


def _note(models: list[dict[str, Any]]) -> str:
    fits = [model["fit"] for model in models if model["fit"]]
    imitated = (
        "There is no GPU here: its cache is imitated in main memory. "
        if any(fit["is_imitated"] for fit in fits)
        else ""
    )
    speed = next((fit["speed"] for fit in fits if fit["speed"]), None)
    return imitated + (f"Speeds are {speed['assumption'].split(';')[0]}." if speed else "")
