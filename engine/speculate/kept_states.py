"""Last hidden states of the newest tokens of requests, for a drafter that reads them."""

import numpy as np

from neo_desktop.engine.batch import FloatArray
from neo_desktop.engine.request import Request

MOST_TOKENS = 1024  # of a request; drafts hardly depend on older tokens, whose hidden states take memory
SPARE = 0.25  # of these tokens: what a run grows by, and what it keeps beyond them while nothing reads it


def most_bytes(most_requests: int, width: int, most_tokens: int = MOST_TOKENS) -> int:
    """Return the most memory of hidden states [width] float32 that are kept."""
    return int((1 + 2 * SPARE) * most_tokens) * most_requests * width * np.float32().nbytes


class Run:
    """Hidden states of consecutive tokens of a request.

    Args:
        states: [tokens, hidden]
    """

    def __init__(self, request: Request, origin: int, states: FloatArray) -> None:
        self.request = request
        self.num_preemptions = request.num_preemptions
        self.origin = origin  # position of the first token that the run ever had
        self.first = origin  # position of the first token that it still has
        self.end = origin + len(states)  # position after the last token
        self._rows = states  # those after `end` have no meaning

    def is_of(self, request: Request) -> bool:
        """Return True if the run is the request's, which was not preempted since; names may be used again."""
        return self.request is request and self.num_preemptions == request.num_preemptions

    def between(self, start: int, end: int) -> FloatArray:
        """Return the hidden states of the tokens from position `start` to `end`, [tokens, hidden]."""
        return self._rows[start - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """Forget the hidden states of the tokens before a position."""
        if position > self.first:
            self._rows, self.first = self.between(position, self.end).copy(), position

    def put(self, position: int, states: FloatArray, spare: int) -> None:
        """Replace the hidden states from a position on; get room for `spare` tokens more if it is short."""
        self.end = position + len(states)
        if self.end - self.first > len(self._rows):
            longer = np.empty((self.end - self.first + spare, states.shape[1]), np.float32)
            longer[: position - self.first] = self.between(self.first, position)
            self._rows = longer
        self.between(position, self.end)[:] = states


class KeptStates:
    """The runs of some requests.

    Tokens whose KV was reused have no hidden states, so a run may begin behind the first token. It begins
    anew where an iteration's tokens do not follow it.

    Args:
        most_requests: with runs at the same time; later ones get none.
        most_tokens: of a run.
    """

    def __init__(self, most_requests: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most_requests, self._most_tokens = most_requests, most_tokens
        self._runs: dict[str, Run] = {}

    def most_bytes(self, width: int) -> int:
        """Return the most memory that the hidden states [width] take."""
        return most_bytes(self._most_requests, width, self._most_tokens)

    def run_of(self, request: Request) -> Run | None:
        """Return the request's run up to its newest computed token; None: it has none."""
        run = self._runs.get(request.request_id)
        if run is None or not run.is_of(request) or run.end < len(request.token_ids) - 1:
            return None
        return run

    def wanted(self, request: Request, end: int, num_tokens: int) -> int:
        """Return how many of the last tokens of a chunk shall have hidden states.

        Args:
            end: position after the chunk.
            num_tokens: of the chunk.
        """
        if not request.params.speculation or request.is_pooled:
            return 0
        if not self._has_room(request):
            return 0
        first = len(request.token_ids) - self._most_tokens
        if request.images is not None:  # the drafter knows texts; hidden states hold what images tell
            first = max(first, int(request.images.positions[-1]))
        return max(min(num_tokens, end - first), 0)

    def _has_room(self, request: Request) -> bool:
        """Return True if the request has a run or may get one; drop the runs of requests that ended."""
        if request.request_id not in self._runs:
            self._runs = {name: run for name, run in self._runs.items() if not run.request.is_finished}
        return request.request_id in self._runs or len(self._runs) < self._most_requests

    def stop(self) -> None:
        """Drop all hidden states, and keep no more."""
        self._most_requests = 0
        self._runs.clear()

    def keep(self, request: Request, position: int, states: FloatArray) -> None:
        """Keep hidden states [tokens, hidden] of tokens from a position on."""
        if not self._most_requests:  # stopped while an iteration ran
            return
        name, run = request.request_id, self._runs.get(request.request_id)
        if run is None or not run.is_of(request) or not run.first <= position <= run.end:
            if self._has_room(request):
                self._runs[name] = Run(request, position, states)
            return
        spare = int(SPARE * self._most_tokens)
        if position + len(states) - run.first > self._most_tokens + spare:  # nothing reads them
            begin = max(position - self._most_tokens, run.first)
            run = self._runs[name] = Run(request, begin, run.between(begin, position).copy())
        run.put(position, states, spare)
