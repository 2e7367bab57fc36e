"""The measured acceptance of drafts."""

from collections.abc import Sequence


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
