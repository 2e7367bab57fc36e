"""HTML as Python values: escaped text, and a Gradio component that reports clicks on its buttons."""

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Navbar

_SCRIPT = (Path(__file__).parent / "panel.js").read_text(encoding="utf-8")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        children: `Markup`, text, or sequences of both; None is left out.
        attributes: `_` stands for `-`, a trailing `_` is dropped; None and False are left out.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(_text(child) for child in children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _text(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, list | tuple):
        return "".join(map(_text, child))
    return child if isinstance(child, Markup) else escape(str(child))


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


def add_navigation() -> None:
    """Show the links to all views."""
    Navbar(main_page_name="Chat")


def panel(value: str = "", **options: Any) -> gr.HTML:
    """Return a component for HTML that Python makes; its events are `act`, `hide` and `seen`."""
    return gr.HTML(value, js_on_load=_SCRIPT, **options)
