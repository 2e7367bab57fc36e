"""An assistant as a drafter: its queries attend to KV of the model, so it has none."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import FloatArray
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.request import Request
from neo_desktop.engine.speculate.draft_model import StepTimes, closed_by_errors
from neo_desktop.engine.speculate.kept_states import KeptStates
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced.assistant import POST_PROJECTION, Pairing
from neo_desktop.models.traced.decoder import TracedDecoder

_Context = tuple[KVTier, IntView, int]
"""Tier, blocks and number of tokens with KV of a request."""
NUM_MEASURED = 5  # steps; the shortest counts, as the first one compiles


class _Rows(NamedTuple):
    """Requests of one tier among the rows of a step."""

    rows: slice
    pool: KVPool
    block_tables: Tensor  # [requests, blocks] int32, where the pool is
    num_tokens: Tensor  # [requests] int32: tokens with KV


class AssistantHead:
    """Drafts with an assistant, a token per step, for all requests together.

    Each step reads the newest token and hidden state. It attends to KV of verified tokens alone, and so all
    steps of a draft have one position. KV must be on the device, or in host memory for the CPU: requests
    whose KV is elsewhere, or moves, get no drafts.
    """

    expected = 0.7

    def __init__(
        self,
        decoder: TracedDecoder,
        stages: Stages,
        pairing: Pairing,
        streams: Streams,
        most_requests: int,
        release: Callable[[], object],
    ) -> None:
        self.most_requests = most_requests
        self.kept: KeptStates = KeptStates(most_requests, most_tokens=1)
        self._streams, self._release = streams, release
        with streams.on_device():
            self._model: _Assistant | None = _Assistant(decoder, stages, pairing, most_requests)
        self._kv: KVCache | None = None  # of the large model; None: not known yet
        self._storage: KVStorage | None = None
        self._steps = StepTimes()

    def read_from(self, kv: KVCache, storage: KVStorage) -> None:
        """Read the large model's KV here from now on, and measure a step."""
        self._kv, self._storage = kv, storage
        tier = next((tier for tier in MEASURED_TIERS if tier in kv.tiers and kv.size(tier).most), None)
        if tier is None or self._model is None:
            return
        block, hidden = np.zeros(1, np.int32), np.zeros((1, self._model.width), np.float32)
        times = []
        with closed_by_errors("the assistant", self.close):
            for _ in range(NUM_MEASURED):
                started = time.perf_counter()
                self._compute([0], hidden, [(tier, block, 1)], 1)
                times.append(1e3 * (time.perf_counter() - started))
            self._steps.learn(1, min(times))

    def is_able(self, request: Request) -> bool:
        name, kv = request.request_id, self._kv
        if kv is None or self._model is None or name not in kv:
            return False
        if kv.tier_of(name) not in MEASURED_TIERS or kv.is_moving(name):
            return False
        return self.kept.run_of(request) is not None

    def ms(self, requests: Sequence[Request], width: int) -> float:
        return width * self._steps.ms(len(requests))

    def draft_all(self, requests: Sequence[Request], width: int) -> list[Sequence[int]]:
        able = [request for request in requests if self.is_able(request)]
        drafts: dict[str, Sequence[int]] = {}
        with closed_by_errors("the assistant", self.close):
            drafts = self._drafts(able, width) if able else {}
        return [drafts.get(request.request_id, ()) for request in requests]

    def close(self) -> None:
        """Drop the assistant and its memory; there are no drafts any more. May be called again."""
        self._model = self._kv = self._storage = None
        self.kept.stop()
        self._release()

    def _drafts(self, requests: list[Request], width: int) -> dict[str, Sequence[int]]:
        kv = self._kv
        assert kv is not None  # `is_able`
        requests.sort(key=lambda request: kv.tier_of(request.request_id).name)  # a tier's rows together
        hidden: list[FloatArray] = []
        contexts: list[_Context] = []
        for request in requests:
            run, name, known = self.kept.run_of(request), request.request_id, len(request.token_ids) - 1
            assert run is not None  # `is_able`
            hidden.append(run.between(known - 1, known))
            contexts.append((kv.tier_of(name), kv.block_table(name), known))
        newest = [request.token_ids[-1] for request in requests]
        started = time.perf_counter()
        drafts = self._compute(newest, np.concatenate(hidden), contexts, width)
        self._steps.learn(len(requests), 1e3 * (time.perf_counter() - started) / width)
        return {request.request_id: draft for request, draft in zip(requests, drafts, strict=True)}

    def _compute(
        self, newest: Sequence[int], hidden: FloatArray, contexts: Sequence[_Context], width: int
    ) -> list[list[int]]:
        """Return a draft per request.

        Args:
            newest: tokens without KV.
            hidden: of the tokens before them, [requests, hidden].
            contexts: those of a tier follow each other.
        """
        model, storage = self._model, self._storage
        assert model is not None  # `is_able`
        assert storage is not None
        known = [num_tokens for _, _, num_tokens in contexts]
        with torch.no_grad(), self._streams.on_device():
            groups = _grouped(contexts, storage)
            token_ids = torch.tensor(newest, dtype=torch.int64, device=model.device)
            positions = torch.tensor(known, dtype=torch.int64, device=model.device)
            states = torch.from_numpy(hidden).to(model.device, model.dtype)
            drafted = []
            for _ in range(width):
                token_ids, states = model.step(token_ids, states, positions, groups)
                drafted.append(token_ids)
            found: list[list[int]] = torch.stack(drafted, dim=1).tolist()
        return found


def _grouped(contexts: Sequence[_Context], storage: KVStorage) -> list[_Rows]:
    """Return the rows by tier."""
    groups, first = [], 0
    for tier, of_tier in groupby(contexts, key=lambda context: context[0]):
        members, pool = list(of_tier), storage[tier]
        tables = np.zeros((len(members), max(len(blocks) for _, blocks, _ in members)), np.int32)
        for row, (_, blocks, _) in zip(tables, members, strict=True):
            row[: len(blocks)] = blocks
        known = torch.tensor([num_tokens for _, _, num_tokens in members], dtype=torch.int32)
        rows = slice(first, first + len(members))
        groups.append(_Rows(rows, pool, torch.from_numpy(tables).to(pool.device), known.to(pool.device)))
        first = rows.stop
    return groups


class _Assistant:
    """The computation of an assistant's steps."""

    def __init__(self, decoder: TracedDecoder, stages: Stages, pairing: Pairing, most_rows: int) -> None:
        config, dtype, device = decoder.config, decoder.dtype, decoder.device
        self.dtype, self.device = dtype, device
        _, self.width = config.of_model.parameters[config.of_model.embedding]  # of the large model
        self._decoder, self._stages, self._layers = decoder, stages, pairing.layers
        scratch = Scratch.empty(config, most_rows, dtype, device)
        self._state = State.empty(config, most_rows, dtype, device, scratch)
        self._scores = torch.empty(most_rows, config.vocab_size, dtype=dtype, device=device)
        self._centroids: Tensor | None = None  # [clusters, hidden]; None: it chooses among all tokens
        if pairing.clusters is not None:
            centroids, token_ids, self._most = pairing.clusters
            self._centroids = centroids.read().to(device, dtype)
            self._members = token_ids.read().to(device, torch.int64).view(len(self._centroids), -1)

    def step(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, groups: Sequence[_Rows]
    ) -> tuple[Tensor, Tensor]:
        """Return the next tokens [n], and the large model's hidden states [n, width] in their places."""
        decoder, stages, state = self._decoder, self._stages, self._state.first(len(token_ids))
        decoder.given = torch.arange(len(token_ids), device=self.device), hidden
        stages.embed(token_ids, positions, state)
        decoder.given = None
        for index, layer in enumerate(self._layers):
            stages.advance(index, state)
            queries, _, _ = stages.heads(state)
            for rows, pool, block_tables, num_tokens in groups:
                q = queries[rows].to(pool.device).contiguous()
                out = torch.empty_like(q)
                pool.layer(layer).decode(DecodeRows(q, block_tables, num_tokens, out))
                state.attention[rows].copy_(out)
        stages.advance(len(self._layers), state)
        stages.final_norm(state, normed := torch.empty_like(state.x))
        behind = normed.new_empty(len(normed), self.width)
        return self._choice(normed), decoder.matrices[POST_PROJECTION].multiply(normed, behind)

    def _choice(self, normed: Tensor) -> Tensor:
        scores = self._stages.logits(normed, self._scores[: len(normed)])
        if self._centroids is None:
            return scores.argmax(dim=-1)
        clusters = (normed @ self._centroids.T).topk(self._most, dim=-1).indices
        members = self._members[clusters].flatten(1)
        best = scores.gather(1, members).argmax(dim=-1, keepdim=True)
        return members.gather(1, best)[:, 0]
