"""The measured acceptance of a request's drafts."""

from collections.abc import Sequence

SMOOTHING = 0.15  # weight of the newest token


class Acceptance:
    """Probability that a draft's next token is right, per kind of draft.

    Drafts count whether they are verified or not: the token that was chosen says whether the draft was right.

    Args:
        expected: probabilities before any draft was compared, by kind.
    """

    def __init__(self, expected: Sequence[float]) -> None:
        self._means = list(expected)

    def mean(self, kind: int) -> float:
        return self._means[kind]

    def learn(self, kind: int, draft: Sequence[int], chosen: Sequence[int]) -> None:
        """Compare a draft with the tokens chosen in its place."""
        for drafted, token_id in zip(draft, chosen, strict=False):
            is_right = drafted == token_id
            self._means[kind] += SMOOTHING * (is_right - self._means[kind])
            if not is_right:
                break
