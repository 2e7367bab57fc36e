"""HTML as Python values: escaped text, and a Gradio component that reports clicks on its buttons."""

from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup, escape

_SCRIPT = (Path(__file__).parent / "panel.js").read_text(encoding="utf-8")


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        children: `Markup`, text, or sequences of both; None is left out.
        attributes: `_` stands for `-`, a trailing `_` is dropped; None and False are left out.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{_text(children)}</{name}>")


def _text(child: object) -> str:
    if isinstance(child, list | tuple):
        return "".join(map(_text, child))
    return "" if child is None else escape(child)


def button(label: str, act: str, *, kind: str = "", title: str | None = None, **data: object) -> Markup:
    """Return a button; a click triggers the panel's `act` event with `act` and `data`."""
    named = {f"data_{key}": value for key, value in data.items()}
    return tag(
        "button", label, type="button", class_=f"button {kind}".strip(), title=title, data_act=act, **named
    )


def progress(title: str, share: float, what: str, *others: object) -> Markup:
    """Return the state of something that takes its time."""
    bar = tag("progress", max=1, value=round(share, 3), aria_label=title)
    parts = [tag("strong", title), bar, tag("span", f"{share:.0%}, {what}"), others]
    return tag("section", parts, class_="card", role="status")


def panel(value: str = "", **options: Any) -> gr.HTML:
    """Return a component for HTML that Python makes; its events are `act`, `hide` and `seen`."""
    return gr.HTML(value, js_on_load=_SCRIPT, **options)
