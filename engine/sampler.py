"""Logits to tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import SampledToken, SamplingInput, TokenLogprob


def sample(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken | None]:
    """Choose one token per row.

    A row's random number depends on its seed, choice and position alone, so a request gets the same tokens
    whatever else is in the batch, under every policy and after every preemption. Order of the steps:
    penalties, temperature, top-k, top-p, min-p, then inversion of the cumulative distribution.

    Args:
        logits: [rows, vocab] float32; not modified.
        inputs: one per row.

    Returns:
        One token per row; None where the logits are not finite, so that there is no answer.
    """
    penalised = _apply_penalties(logits, inputs)
    token_ids = penalised.argmax(dim=-1)
    random_rows = [row for row, item in enumerate(inputs) if not item.params.is_greedy]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        token_ids[index] = _draw(penalised[index], [inputs[row] for row in random_rows])

    chosen: list[int] = token_ids.tolist()
    is_finite: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    logprobs = _logprobs(logits, inputs, chosen)
    return [
        SampledToken(token_id, *logprobs.get(row, ())) if is_finite[row] else None
        for row, token_id in enumerate(chosen)
    ]


def _apply_penalties(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    rows = [row for row, item in enumerate(inputs) if item.params.has_penalties]
    if not rows:
        return logits
    logits = logits.clone()
    vocab_size = logits.shape[-1]
    for row in rows:
        params, prompt, output = (
            inputs[row].params,
            inputs[row].prompt_token_ids,
            inputs[row].output_token_ids,
        )
        seen = torch.tensor(sorted({*prompt, *output}), device=logits.device)
        values = logits[row, seen]
        # As in CTRL (Keskar et al., 2019): away from the token, whichever sign its logit has.
        logits[row, seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        counts = torch.bincount(
            torch.tensor(output, dtype=torch.int64, device=logits.device), minlength=vocab_size
        )
        logits[row] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return logits


def _draw(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Draw one token per row [rows, vocab]; returns [rows] int64."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    params = [item.params for item in inputs]
    # Relative to the largest logit first: a very low temperature then gives -inf, never nan.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    uniform = column([_uniform(item) for item in inputs])

    if all(p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in params):
        return _invert(scaled.softmax(dim=-1), uniform)

    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = column([p.top_k or vocab_size for p in params])
    values = values.masked_fill(torch.arange(vocab_size, device=logits.device) >= top_k, -torch.inf)
    probs = values.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # A token stays while those before it have not reached top_p; the first one always stays.
    dropped = (mass_before >= column([p.top_p for p in params])) | (
        probs < column([p.min_p for p in params]) * probs[:, :1]
    )
    dropped[:, 0] = False
    ranks = _invert(probs.masked_fill(dropped, 0.0), uniform)
    return order.gather(1, ranks.unsqueeze(1)).squeeze(1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which the cumulative weight passes `uniform` (in [0, 1)) of the total."""
    cumulative = weights.to(torch.float64).cumsum(dim=-1)
    # `right`: a token of weight 0 is never chosen, also when the random number is 0.
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    last = (weights > 0).to(torch.int64).cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(index, last)


def _uniform(item: SamplingInput) -> float:
    key = np.array([item.seed % 2**64, item.choice], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=item.position)).random())


def _logprobs(
    logits: Tensor, inputs: Sequence[SamplingInput], chosen: Sequence[int]
) -> Mapping[int, tuple[TokenLogprob, tuple[TokenLogprob, ...]]]:
    """Return `row -> (chosen token, top tokens)` for the rows that asked."""
    found = {}
    for row, item in enumerate(inputs):
        if item.params.logprobs is None:
            continue
        logprobs = logits[row].log_softmax(dim=-1)
        top = logprobs.topk(item.params.logprobs)
        found[row] = (
            TokenLogprob(chosen[row], float(logprobs[chosen[row]])),
            tuple(map(TokenLogprob, top.indices.tolist(), top.values.tolist())),
        )
    return found
