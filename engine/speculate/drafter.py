"""Drafters: guesses at a request's next tokens, and their measured acceptance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.request import Request
from neo_desktop.engine.speculate.kept_states import KeptStates

if TYPE_CHECKING:  # `kv.storage` imports torch; the scheduler must not
    from neo_desktop.engine.kv.storage import KVStorage


class Draft(NamedTuple):
    """A guess at a request's next tokens."""

    token_ids: Sequence[int]
    kind: int = 0  # index into `Drafter.expected`; drafts of a kind have similar acceptance
    is_predicted: bool = False  # from the request's predicted output


NO_DRAFT = Draft(())


class Acceptance:
    """Probability that a draft's next token is right, per kind of draft.

    Drafts count whether they are verified or not: the token that was chosen says whether the draft was right.

    Args:
        means: probabilities before any draft was compared, by kind.
        smoothing: weight of the newest token.
    """

    def __init__(self, means: Sequence[float], smoothing: float) -> None:
        self.means = list(means)
        self._smoothing = smoothing

    def learn(self, kind: int, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Compare a draft with the tokens chosen in its place."""
        for drafted, token_id in zip(draft, chosen, strict=False):
            is_right = drafted == token_id
            self.means[kind] += self._smoothing * (is_right - self.means[kind])
            if not is_right:
                break


class Drafter(Protocol):
    """A source of drafts that costs nearly no time. Equal tokens give equal drafts."""

    @property
    def expected(self) -> Sequence[float]:
        """Acceptance of a token per kind of draft, before any was measured."""

    def draft(self, request: Request, most: int) -> Draft:
        """Return at most `most` tokens after the request's known tokens."""


class ModelDrafter(Protocol):
    """A source of drafts that computes them, which takes time. All its drafts are of one kind."""

    @property
    def expected(self) -> float:
        """Acceptance of a token before any was measured."""

    @property
    def kept(self) -> KeptStates | None:
        """Hidden states that it reads; None: it reads tokens alone."""

    @property
    def most_requests(self) -> int:
        """Most requests of a call."""

    def read_from(self, kv: KVCache, storage: "KVStorage") -> None:
        """Get to know the model's KV, before the first request."""

    def is_able(self, request: Request) -> bool:
        """Return True if drafts for this request are possible."""

    def ms(self, requests: Sequence[Request], width: int) -> float:
        """Return the predicted time of `draft_all`."""

    def draft_all(self, requests: Sequence[Request], width: int) -> list[Sequence[int]]:
        """Return at most `width` tokens after each request's known tokens; empty: no draft."""
