"""Refusals, as messages on the page."""

import contextlib
from collections.abc import Iterator

import gradio as gr
from pydantic import ValidationError

from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.messages import NotFoundError, NotPossibleError
from neo_desktop.app.errors import ApiError, ServiceError
from neo_desktop.app.selftest import SelfTestError
from neo_desktop.app.shelf.hosting import ShelfError
from neo_desktop.engine.errors import SettingError

# What a person can cause; the page shows its message.
REFUSALS = (
    *(ApiError, NotFoundError, NotPossibleError, SelfTestError, ServiceError),
    *(SettingError, ShelfError, StoreError, ValidationError),
)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Show a refusal on the page."""
    try:
        yield
    except REFUSALS as error:
        is_file = isinstance(error, ValidationError)
        text = "this is no file that neo-desktop has exported" if is_file else str(error)
        if text.partition(" ")[0].isalpha():  # not the name of a file
            text = text[:1].upper() + text[1:]
        raise gr.Error(text, print_exception=False, duration=8) from None
