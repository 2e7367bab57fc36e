"""Drafters: guesses at a request's next tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from neo_desktop.engine.request import Request


class Draft(NamedTuple):
    """A guess at a request's next tokens."""

    token_ids: Sequence[int]
    kind: int = 0  # index into `Drafter.expected`; drafts of a kind have similar acceptance
    is_predicted: bool = False  # from the request's predicted output


NO_DRAFT = Draft(())


class Drafter(Protocol):
    """A source of drafts. Equal tokens give equal drafts."""

    @property
    def expected(self) -> Sequence[float]:
        """Acceptance of a token per kind of draft, before any was measured."""

    def draft(self, request: Request, most: int) -> Draft:
        """Return at most `most` tokens after the request's known tokens."""
