"""One open page: which chat it shows."""

import itertools
from dataclasses import dataclass, field

from neo_desktop.ui.rows import WINDOW

_numbers = itertools.count()


@dataclass(slots=True)
class Look:
    """The state of one page, which its events share."""

    chat_id: str | None = None
    query: str = ""
    window: int = WINDOW  # messages
    message_ids: list[str] = field(default_factory=list)  # of the rows as drawn
    deleted: tuple[str, str] | None = None  # id and title of the chat that can be restored
    topic: str = field(default_factory=lambda: f"look {next(_numbers)}")  # told when any of this changes

    def __deepcopy__(self, _: object) -> "Look":
        """Return the look of another page: Gradio copies the first one for each session."""
        return Look()
