"""The outputs of an iteration: tokens for its sequences, and their hidden states."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import (
    FloatArray,
    IterationResult,
    IterationTiming,
    SampledToken,
    ScheduledSequence,
)
from neo_desktop.engine.cuda.copies import download, upload
from neo_desktop.engine.execute.workspace import Workspace
from neo_desktop.engine.sampler import is_plain, start_sampling
from neo_desktop.models.operators import NO_TOKEN
from neo_desktop.models.stages import Stages


class Outputs:
    """The requested outputs of an iteration.

    Args:
        ends: Sequences, each with the row of its last token: among all sub-batches' rows, or among the
            computed last states.
        workspace: Holds the logits of a graph, and keeps the tokens for the next iteration.
        chosen_rows: Number of rows whose tokens the program's graph chooses; None: it chooses none.
    """

    def __init__(
        self,
        ends: Sequence[tuple[ScheduledSequence, int]],
        stages: Stages,
        workspace: Workspace,
        chosen_rows: int | None,
    ) -> None:
        sampled = [(s.request_id, row, s.sampling) for s, row in ends if s.sampling is not None]
        self._names, self._rows, self._sampling = (
            map(list, zip(*sampled, strict=True)) if sampled else ([], [], [])
        )
        self._pooled = [end for end in ends if end[0].num_pooled]
        self._shown = [end for end in ends if end[0].num_hidden]
        self._stages = stages
        self._workspace = workspace
        self._tokens: Callable[[], Sequence[SampledToken | None]] = tuple
        self._sums: Callable[[], Mapping[str, FloatArray]] = dict
        self._hidden: Callable[[], Mapping[str, FloatArray]] = dict
        # Use the graph's tokens if every sequence samples greedily; else sample from the logits.
        self._chosen_rows = chosen_rows
        if not all(map(is_plain, self._sampling)):
            self._chosen_rows = None
        rows = range(len(self._names)) if self._chosen_rows is None else self._rows
        has_room = max(self._chosen_rows or 0, len(rows)) <= len(workspace.latest)
        # request ID -> row of its token in `Workspace.latest` after this iteration.
        self.rows_of_tokens: Mapping[str, int] = dict(zip(self._names, rows, strict=True)) if has_room else {}

    @property
    def count(self) -> int:
        return len(self._names) + len(self._pooled) + len(self._shown)

    def start(self, states: Tensor | None) -> None:
        """Queue the computation of tokens and sums on the device after the layers, without waiting.

        Args:
            states: [rows, hidden], the requested last hidden states; None: the graph has chosen tokens.
        """
        if self._shown:
            self._start_hidden(self._workspace.last_hidden if states is None else states)
        if states is None:
            self._start_from_graph()
            return
        rows = self._rows
        if self._pooled:
            self._start_sums(states)
        if len(rows) < len(states):
            states = states[upload(rows, torch.int64, states.device)]
        if rows:
            vocab_size = self._stages.decoder.config.vocab_size
            out = torch.empty(len(rows), vocab_size, dtype=states.dtype, device=states.device)
            self._sample(self._stages.logits(states, out))

    def result(self, timing: IterationTiming) -> IterationResult:
        """Wait for the started computation, and return the result."""
        firsts: dict[str, SampledToken | None] = {}
        after_drafts: dict[str, list[SampledToken | None]] = {}
        for request_id, token in zip(self._names, self._tokens(), strict=True):
            if request_id in firsts:
                after_drafts.setdefault(request_id, []).append(token)
            else:
                firsts[request_id] = token
        sums = self._sums()
        damaged = [request_id for request_id, token in firsts.items() if token is None]
        damaged += [request_id for request_id, total in sums.items() if not np.isfinite(total).all()]
        return IterationResult(
            sampled={request_id: token for request_id, token in firsts.items() if token is not None},
            failed=dict.fromkeys(
                damaged,
                "the model's output is not finite: its weights may be damaged, or the numbers "
                f"exceed {self._stages.decoder.dtype}; try another dtype",
            ),
            after_drafts={
                request_id: tuple(token for token in takewhile(bool, tokens) if token is not None)
                for request_id, tokens in after_drafts.items()
            },
            pooled=sums,
            hidden=self._hidden(),
            timing=timing,
        )

    def _start_from_graph(self) -> None:
        workspace, rows = self._workspace, self._rows
        if self._chosen_rows is None:
            index = upload(rows, torch.int64, workspace.logits.device)
            self._sample(workspace.logits.index_select(0, index))
            return
        chosen = workspace.tokens[: self._chosen_rows]
        arrived = download(chosen)

        def read() -> Sequence[SampledToken | None]:
            tokens = arrived().tolist()
            return [None if tokens[row] == NO_TOKEN else SampledToken(tokens[row]) for row in rows]

        self._tokens = read
        self._keep(chosen)

    def _sample(self, logits: Tensor) -> None:
        sampling = start_sampling(logits, self._sampling)
        self._tokens = sampling.wait
        self._keep(sampling.token_ids)

    def _keep(self, token_ids: Tensor) -> None:
        """Keep tokens for an iteration that starts before they are read. Call this last.

        If an earlier step fails and the iteration is repeated, the previous iteration's tokens still exist.
        """
        if self.rows_of_tokens:
            self._workspace.keep_tokens(token_ids)

    def _start_hidden(self, states: Tensor) -> None:
        rows = [row + i for s, row in self._shown for i in range(1 - s.num_hidden, 1)]
        arrived = download(states[upload(rows, torch.int64, states.device)])

        def read() -> Mapping[str, FloatArray]:
            found: dict[str, list[FloatArray]] = {}
            parts = torch.split(arrived().float(), [s.num_hidden for s, _ in self._shown])
            for (s, _), part in zip(self._shown, parts, strict=True):
                found.setdefault(s.request_id, []).append(part.numpy())
            return {request_id: np.concatenate(each) for request_id, each in found.items()}

        self._hidden = read

    def _start_sums(self, states: Tensor) -> None:
        totals = [states[row + 1 - s.num_pooled : row + 1].float().sum(dim=0) for s, row in self._pooled]
        arrived = download(torch.stack(totals))
        names = [s.request_id for s, _ in self._pooled]
        self._sums = lambda: dict(zip(names, arrived().numpy(), strict=True))
