"""Prompt lookup: a request's last tokens occurred before, and what followed them then is the draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.request import Request
from neo_desktop.engine.speculate.drafter import NO_DRAFT, Draft

SHORTEST, LONGEST = 2, 7  # compared tokens
BOUNDARY = -1  # a token that equals no other


@dataclass(slots=True)
class _Text:
    """Tokens to search: the predicted output, a boundary, then the request's own tokens."""

    tokens: IntArray
    num_predicted: int  # tokens before the boundary
    num_own: int = 0


class NgramDrafter:
    """Drafts what followed the latest of the longest occurrences of the last tokens.

    A predicted output is searched as if it followed the prompt. Of equally long occurrences, those in the
    predicted output win.
    """

    expected: Sequence[float] = (0.3, 0.45, 0.55, 0.65, 0.75, 0.8)  # by length, from SHORTEST on

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def draft(self, request: Request, most: int) -> Draft:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _begun(request)
        if text.num_own:
            for token_id in request.token_ids[text.num_own :]:
                text.tokens.append(token_id)
        else:
            text.tokens.extend(request.token_ids)
        text.num_own = len(request.token_ids)
        tokens = text.tokens.view()
        end, length = _occurrence(tokens, text.num_predicted)
        if length < SHORTEST:
            return NO_DRAFT
        following = tokens[end + 1 : end + 1 + most]
        if len(following) < most:  # a repetition up to the end continues
            following = np.resize(following, most)
        drafted = following.tolist()
        if BOUNDARY in drafted:
            del drafted[drafted.index(BOUNDARY) :]
        return Draft(drafted, length - SHORTEST, end < text.num_predicted)


def _begun(request: Request) -> _Text:
    predicted = request.predicted_token_ids
    if not predicted:
        return _Text(IntArray(), 0)
    # The prompt's end precedes the predicted output, so that its beginning is found.
    before = request.prompt_token_ids[-LONGEST:]
    tokens = IntArray((*before, *predicted, BOUNDARY))
    return _Text(tokens, len(tokens))


def _occurrence(tokens: IntView, num_predicted: int) -> tuple[int, int]:
    """Return the position of the last token of the best earlier occurrence, and its length."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last]) if last >= 0 else np.empty(0, np.int64)
    length = 0
    while len(ends):
        best, length = ends, length + 1
        if length == LONGEST or length > last:
            break
        ends = ends[int(ends[0] < length) :]
        ends = ends[tokens[ends - length] == tokens[last - length]]
    if not length:
        return 0, 0
    in_predicted = best[best < num_predicted]
    return int((in_predicted if len(in_predicted) else best)[-1]), length
