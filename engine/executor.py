"""Carries out plans: copies blocks, runs the model with paged attention, samples."""

from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.engine.attention import AttentionBatch
from neo_desktop.engine.batch import IterationPlan, IterationResult, SubBatch
from neo_desktop.engine.kv_storage import KVStorage
from neo_desktop.engine.sampler import sample
from neo_desktop.models.decoder import Decoder


class Executor(Protocol):
    """Whatever turns plans into results; tests put a fake one here."""

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Carry out one iteration."""
        ...


class ModelExecutor:
    """Runs a plan's sub-batches one after the other on the model's device.

    The model gives linear stages only; between `pre_attention` and `post_attention` of each layer, attention
    is computed where the KV lives.
    """

    def __init__(self, model: Decoder, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage

    @torch.inference_mode()
    def execute(self, plan: IterationPlan) -> IterationResult:
        """Carry out one iteration."""
        self._storage.copy_blocks(plan.copies)
        logits = [self._forward(sub_batch) for sub_batch in plan.sub_batches]
        sampling = [(s.request_id, s.sampling) for s in plan.sequences if s.sampling is not None]
        tokens = sample(torch.cat(logits), [item for _, item in sampling])
        by_request = {request_id: token for (request_id, _), token in zip(sampling, tokens, strict=True)}
        return IterationResult(
            sampled={request_id: token for request_id, token in by_request.items() if token is not None},
            failed={
                request_id: "the model's output is not finite: its weights may be damaged, or the numbers "
                f"exceed {self._model.dtype}; try another dtype"
                for request_id, token in by_request.items()
                if token is None
            },
        )

    def _forward(self, sub_batch: SubBatch) -> Tensor:
        """Return the logits [rows, vocab] of the sequences that are to be sampled, in their order."""
        model, sequences = self._model, sub_batch.sequences
        token_ids = [token_id for s in sequences for token_id in s.token_ids]
        positions = [position for s in sequences for position in range(s.start, s.context_len)]
        attention = AttentionBatch(sub_batch, self._storage)

        hidden = model.embed(torch.tensor(token_ids, device=model.device))
        rotary = model.rotary(torch.tensor(positions, device=model.device))
        scale = model.config.attention_scale
        for layer, window in enumerate(model.config.layer_windows):
            q, k, v = model.pre_attention(layer, hidden, rotary)
            hidden = model.post_attention(layer, hidden, attention(layer, q, k, v, scale, window))

        ends = accumulate(len(s.token_ids) for s in sequences)
        rows = [end - 1 for s, end in zip(sequences, ends, strict=True) if s.sampling is not None]
        return model.logits(hidden[torch.tensor(rows, dtype=torch.int64, device=model.device)])
