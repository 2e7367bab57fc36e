"""Whether two policies answered alike.

Policies put the same requests into different batches, and matrix products round differently for different
batch sizes. In 32 bits that never showed in a chosen token; in 16 bits two tokens of nearly the same
probability may change places, and everything after them is another text. So, where two answers part, the
tokens that they chose there must be nearly equally probable; otherwise the answer was changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neo_desktop.engine.batch import SampledToken

TOP_LOGPROBS = 5

# By how much two tokens' log-probabilities may differ for one to be taken for the other: a few units in the
# last place of a logit of 16 to 32.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.8}

Answer = tuple[SampledToken, ...]  # with TOP_LOGPROBS log-probabilities each


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of one policy beside those of another."""

    identical: int
    near_ties: int  # part where two tokens were nearly equally probable
    changed: int  # part elsewhere, or are of another length: a failure


def compare(answers: Sequence[Answer], reference: Sequence[Answer], tolerance: float) -> Comparison:
    """Set the answers to the same prompts side by side."""
    identical = near_ties = 0
    for answer, expected in zip(answers, reference, strict=True):
        parting = next(
            (at for at, (a, b) in enumerate(zip(answer, expected, strict=False)) if a.token_id != b.token_id),
            None,
        )
        if parting is None:
            identical += len(answer) == len(expected)
        else:
            near_ties += _is_near_tie(answer[parting], expected[parting], tolerance)
    return Comparison(identical, near_ties, len(answers) - identical - near_ties)


def _is_near_tie(token: SampledToken, expected: SampledToken, tolerance: float) -> bool:
    """Whether both runs gave either token nearly the same probability."""
    for chosen, other in ((token, expected.token_id), (expected, token.token_id)):
        probabilities = {top.token_id: top.logprob for top in chosen.top_logprobs}
        if chosen.logprob is None or other not in probabilities:
            return False
        if chosen.logprob.logprob - probabilities[other] > tolerance:
            return False
    return True
