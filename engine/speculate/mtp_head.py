"""A model's layer of multi-token prediction as a drafter.

The layer's input at a position is the hidden state that the model computed there, and the next token; its
result is a guess at the token after that. So its tokens are the request's without the first one. Behind the
newest token, its own hidden states take the place of the model's.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from neo_desktop.engine.batch import FloatArray, IterationPlan, IterationResult, ScheduledSequence
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.request import Request
from neo_desktop.engine.speculate.draft_model import Context, DraftLimits, DraftModel
from neo_desktop.engine.speculate.kept_states import KeptStates, Run
from neo_desktop.models.vision.prompt import ImageRows, Sight


class MtpHead(DraftModel):
    """Drafts with a layer of multi-token prediction, which has KV of its own.

    Its KV begins with the first token whose hidden state is known. Rotations depend on distances alone, so
    its positions count from there. KV of drafted tokens comes from the layer's own hidden states; it is
    replaced once the model's are known.
    """

    expected = 0.7
    reads_images = True  # drafting begins after a prompt's last image

    def __init__(
        self,
        execute: Callable[[IterationPlan], IterationResult],
        kv: KVCache,
        release: Callable[[], object],
        limits: DraftLimits,
    ) -> None:
        self.kept: KeptStates = KeptStates(limits.most_requests, limits.max_tokens)
        self._runs: dict[str, Run] = {}  # request ID -> its kept hidden states, while the layer holds its KV
        self._own: dict[str, FloatArray] = {}  # the layer's newest hidden state, [1, hidden]
        super().__init__(execute, kv, release, limits)

    def draft_all(self, requests: Sequence[Request], width: int) -> list[Sequence[int]]:
        current = {request.request_id: self.kept.run_of(request) for request in requests}
        self._free([name for name, run in self._runs.items() if run is not current.get(name, run)])
        self._own.clear()
        drafts = super().draft_all(requests, width)
        for name, context in self._contexts.items():
            run = self._runs[name]
            del context.token_ids[len(context.request.token_ids) - 1 - run.origin :]  # their KV is a guess
            run.drop_before(run.origin + len(context.token_ids) - 1)
        return drafts

    def close(self) -> None:
        super().close()
        self.kept.stop()

    def is_able(self, request: Request) -> bool:
        return self.kept.run_of(request) is not None and super().is_able(request)

    def _num_known(self, request: Request) -> int:
        return len(request.token_ids) - 1 - self._run_of(request).origin

    def _known(self, request: Request) -> Sequence[int]:
        return request.token_ids[self._run_of(request).origin + 1 :]

    def _run_of(self, request: Request) -> Run:
        run = self.kept.run_of(request)
        assert run is not None  # `is_able`
        return run

    def _run(self, sequences: Iterable[ScheduledSequence]) -> IterationResult:
        result = super()._run(sequences)
        self._own |= result.hidden
        return result

    def _sequence(
        self, name: str, context: Context, token_ids: Sequence[int], *, is_last: bool
    ) -> ScheduledSequence:
        start, run = len(context.token_ids), self._runs[name]
        end = start + len(token_ids)
        hidden = self._own.pop(name, None)
        if hidden is None:
            hidden = run.between(run.origin + start, run.origin + end)
        sequence = super()._sequence(name, context, token_ids, is_last=is_last)
        return sequence._replace(images=_given(start, hidden), num_hidden=int(is_last))

    def _context_of(self, request: Request, width: int) -> Context | None:
        context = super()._context_of(request, width)
        if context is not None:
            self._runs[request.request_id] = self._run_of(request)
        return context

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            super()._free([name])
            run = self._runs.pop(name)
            run.origin = run.first  # earlier hidden states are gone


def _given(start: int, hidden: FloatArray) -> ImageRows:
    """Return hidden states [tokens, hidden] from a position on as rows that are given, like an image's."""
    return ImageRows(
        positions=np.arange(start, start + len(hidden)),
        embeddings=hidden,
        starts=(),
        sight=Sight.CAUSAL,
        ends=(),
        axes=(),
        rotations=np.empty(0, np.int64),
        others=np.empty((0, len(hidden)), np.int64),
    )
