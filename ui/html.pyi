"""HTML as Python values: escaped text, and a Gradio component that reports clicks on its buttons."""

from html import escape
from typing import Any

import gradio as gr

VOID = frozenset({"br", "hr", "input"})

# `data-act` names what a click asks for; a page that is hidden or shown again says so, too.
_SCRIPT = """
element.addEventListener('click', (event) => {
  const asked = event.target.closest('[data-act]');
  if (!asked || asked.getAttribute('aria-disabled') === 'true') return;
  event.preventDefault();
  trigger('act', {...asked.dataset});
});
document.addEventListener('visibilitychange', () => {
  if (!element.isConnected) return;
  if (document.hidden) trigger('hide'); else trigger('seen');
});
"""

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
    if name in VOID:
        return Markup(f"<{name}{written}>")
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

class Panel(gr.HTML):
    """HTML that Python makes; its events are `act`, `hide` and `seen`."""

    def __init__(self, value: str = "", **options: Any) -> None:
        super().__init__(value, js_on_load=_SCRIPT, **options)

    def get_block_name(self) -> str:
        """Return the component that shows it."""
        return "html"
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component
